"""Terminal sessions of the documents, typed by a script into the real commands on lab hosts.

    python -m benchmarks.agents.transcript                    print the sessions
    python -m benchmarks.agents.transcript readme             only that one (or: cluster, failing)
    python -m benchmarks.agents.transcript readme --write     and put it into its document

``cluster`` is docs/transcripts/first-cluster.txt: four machines pair, leave, die and return. ``readme`` is
the first ten minutes of README.md: three machines train, one loses its power, the run is stopped and resumed.
``failing`` is the part of README.md about a worker that fails.
Tests type them again and compare, apart from what differs each time: ids, codes, figures, paths.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from barnraise.agent_client.bootstrap import AGENT_LOG
from barnraise.cli.agent_call import root_warning
from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import PAIRING_CODE, CommandLine
from lab import Lab, LabProcess

CLUSTER = REPOSITORY / "docs" / "transcripts" / "first-cluster.txt"
README = REPOSITORY / "README.md"
TRAIN = REPOSITORY / "examples" / "train.py"
NAMES = ("mac", "pc", "nas", "laptop")
PROMPTS = tuple(f"{name}$" for name in NAMES)
RUN_NAME = re.compile(r"barnraise: run (\S+)")
_TEN_MINUTES = "Your first ten minutes"
_FAILING = "When a worker fails"
_SHOWN = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SCRIPT = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PATIENCE_S = 300.0
_SAID_OR_NOT = (
    r"^.* would be \S+ times as fast as these \d+ machines together: .*$",  # if they were measured so
    r"^.* a virtual machine may need more processor time\.?$",  # the lab's own core was taken away
    r"^ *more, in the repository: docs/doctor/stalls\.md$",
    r"^ *note: the machine was busy when its speed was measured .*\n",
    r"^ *note: the speed of .* varies: .*\n",
    # the lab needs root, people do not
    r"^barnraise: the agent runs as root, .*\n",
    # where the cluster takes a moment
    r"^The code was used by .* Waiting for the cluster to decide \.\.\.\n",
    # where a machine is busy with something else
    r"^barnraise: .+ \(\d+ (s|min)\)\n",
    r"^barnraise: \w+ is too slow to wait for .*\n",
    # where another machine has a newer one
    r"^barnraise: \w+: resuming from the checkpoint of step .*\n",
    # where the newest checkpoint is older than the last step
    r"^barnraise: The run committed [\d,]+ steps; its newest checkpoint is older\. .*\n",
    # where it takes some seconds
    r"^barnraise: step [\d,]+ of .*\n",
    # where it takes more than a moment
    r"^barnraise: stopping: .*\n",
    # where workers do not end within one moment
    r"^(barnraise: \w+ has finished; waiting for .*\n)+(?=barnraise: the script wrote )",
)


class TypedCommands(Protocol):
    """Machines on which commands can be typed."""

    def start(self, place: int, *words: str, folder: Path | None = None) -> LabProcess:
        """Start a command in the background; its output is kept."""

    def until(self, truth: Callable[[], bool], seconds: float, what: str) -> float:
        """Wait until the condition is true and return the seconds that this took."""


class Session:
    """Recorded terminal session: the commands typed on each machine, and their output."""

    def __init__(
        self, line: TypedCommands, folder: Path | None = None, prompts: Sequence[str] = PROMPTS
    ) -> None:
        self._line = line
        self._folder = folder
        self._prompts = prompts
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines += ["", f"# {text}"]

    def type(self, place: int, *words: str) -> str:
        """Run a command to its end."""
        window = self.open(place, *words)
        window.close()
        return window.output

    def open(self, place: int, *words: str) -> Window:
        """Type a command that goes on while others are typed elsewhere."""
        self.lines += ["", f"{self._prompts[place]} barnraise {' '.join(words)}"]
        return Window(self, self._line.start(place, *words, folder=self._folder))

    def pair(self, owner: int, joiner: int, *options: str) -> None:
        """Pair two machines in two windows: one waits while the code is typed in the other."""
        waiting = self.open(owner, "pair", *options)
        self.join(waiting, joiner)
        self.lines.append(f"# and on {NAMES[owner]}:")
        waiting.close()

    def join(self, waiting: Window, joiner: int) -> None:
        """Type the code that the waiting command shows on another machine."""
        waiting.show_until("works once")
        self.type(joiner, "join", PAIRING_CODE.findall(waiting.output)[-1])

    def until(self, truth: Callable[[], bool], what: str) -> None:
        self._line.until(truth, _PATIENCE_S, what)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Type commands without recording them, because the session has shown similar ones already."""
        before = len(self.lines)
        yield
        del self.lines[before:]


class Window:
    """A running command; each line of its output is shown once."""

    def __init__(self, session: Session, process: LabProcess) -> None:
        self._session = session
        self._process = process
        self._shown = 0

    @property
    def output(self) -> str:
        """Return the output as a person without the rights of root sees it; the lab has them."""
        return self._process.output().replace(f"{root_warning(0)}\n", "")

    def show_until(self, words: str, more: int = 1) -> None:
        """Show the output until ``more`` further lines contain these words; the last line shown is one of
        them.
        """

        def end_of_words() -> int | None:
            whole = self.output.rpartition("\n")[0].splitlines()
            places = [place for place, line in enumerate(whole) if place >= self._shown and words in line]
            return places[more - 1] + 1 if len(places) >= more else None

        what = f"{words!r} appears in {' '.join(self._process.argv[3:])}"
        self._session.until(lambda: end_of_words() is not None or self._process.poll() is not None, what)
        end = end_of_words()
        assert end is not None, f"it ended before {what}:\n{self.output}"
        self._show(end)

    def close(self) -> None:
        """Wait for its end and show the rest."""
        self._process.wait(_PATIENCE_S)
        self._show(len(self.output.splitlines()))

    def _show(self, end: int) -> None:
        self._session.lines += self.output.rstrip().splitlines()[self._shown : end]
        self._shown = end


class Recording(NamedTuple):
    """The recorded file, and how many stalls the agents logged meanwhile."""

    text: str
    stalls: int


def record_cluster() -> Recording:
    """Record the session of four machines, from the first command to an unpaired laptop."""
    with Lab(hosts=4) as lab, Machines(lab.hosts) as machines:
        session = Session(CommandLine(machines))
        session.say("Four machines on one network; no address is typed.")
        for place, name in enumerate(NAMES):
            session.type(place, "up", "--detach")
            session.type(place, "rename", name)
        session.pair(0, 1)
        session.pair(0, 2)
        session.say("The friend's laptop becomes a guest.")
        session.pair(0, 3, "--guest")
        session.until(lambda: machines.agree(range(4)), "all agree")
        session.until(lambda: machines.are_links_measured(6), "all links are measured")
        session.type(0, "status")
        session.type(0, "status", "--graph")
        session.type(2, "nodes")
        session.type(1, "doctor")
        session.say("The laptop leaves.")
        session.type(3, "down")
        session.until(lambda: machines.agree([0, 1, 2]), "the others go on without it")
        session.type(0, "status")
        session.say("The mac, which coordinates, loses its power.")
        os.kill(machines.status(0).pid, signal.SIGKILL)
        session.until(lambda: machines.agree([1, 2]), "the others go on without it")
        session.type(1, "status")
        session.say("It comes back automatically.")
        session.type(0, "up", "--detach")
        session.until(lambda: machines.agree([0, 1, 2]), "mac is back")
        session.type(1, "status")
        session.say("The laptop is not wanted any more; it cannot return.")
        session.type(0, "unpair", "laptop", "--yes")
        session.type(0, "nodes")
        session.say("A wrong code is burned after one guess. (First the laptop leaves and starts again.)")
        session.type(3, "up", "--detach")
        session.type(3, "leave", "--yes")
        session.type(3, "up", "--detach")
        code = session.type(0, "pair", "--no-wait")
        match = PAIRING_CODE.search(code)
        assert match is not None
        number, first, second, third = match[1].split("-")
        session.type(3, "join", f"{number}-{second}-{third}-{first}")
        for place in range(4):
            session.type(place, "down")
        return Recording(_plain("\n".join(session.lines).strip() + "\n", machines), _stalls(machines))


def record_readme() -> Recording:
    """Return the README with the current output of its commands."""
    with (
        tempfile.TemporaryDirectory(prefix="by-t-") as directory,
        Lab(hosts=3) as lab,
        Machines(lab.hosts) as machines,
    ):
        folder = Path(directory) / "spiral"
        folder.mkdir()
        shutil.copy(TRAIN, folder)
        machines.extra["OMP_NUM_THREADS"] = "1"  # the hosts share the cores of one machine
        blocks = [_plain(block, machines) for block in _ten_minutes(lab, machines, folder)]
        stalls = _stalls(machines)
    text = _with_blocks(README.read_text(encoding="utf-8"), _TEN_MINUTES, blocks)
    script = f"```python\n{TRAIN.read_text(encoding='utf-8')}```"
    section = _section(text, _TEN_MINUTES)
    return Recording(text.replace(section, _SCRIPT.sub(lambda _: script, section)), stalls)


def record_failing() -> Recording:
    """Return the README with the current output of a run whose script fails on one machine."""
    readme = README.read_text(encoding="utf-8")
    with (
        tempfile.TemporaryDirectory(prefix="by-t-") as directory,
        Lab(hosts=3) as lab,
        Machines(lab.hosts) as machines,
    ):
        folder = Path(directory) / "labels"
        folder.mkdir()
        (folder / "train.py").write_text(shown_script(readme, _FAILING), encoding="utf-8")
        for place, name in enumerate(NAMES[:3]):
            lab.hosts[place].host_name = name
            machines.start(place)
        for joiner in (1, 2):
            machines.pair(0, joiner)
        session = Session(CommandLine(machines), folder)
        session.until(lambda: machines.agree(range(3)), "all agree")
        run = RUN_NAME.search(session.type(0, "run", "train.py"))
        assert run is not None
        session.type(2, "ps", run[1])
        block = _plain("\n".join(session.lines).strip() + "\n", machines)
        return Recording(_with_blocks(readme, _FAILING, [block]), _stalls(machines))


def _stalls(machines: Machines) -> int:
    logs = [machines.state(place) / AGENT_LOG for place in range(len(machines.hosts))]
    return sum(log.read_text(errors="replace").count("asleep or stopped") for log in logs if log.exists())


def _ten_minutes(lab: Lab, machines: Machines, folder: Path) -> Iterator[str]:
    """Yield the blocks of the README's first ten minutes, one after the other."""
    session = Session(CommandLine(machines), folder)

    def block() -> str:
        shown = "\n".join(session.lines).strip() + "\n"
        session.lines.clear()
        return shown

    for host, name in zip(lab.hosts, NAMES, strict=False):
        host.host_name = name
    waiting = session.open(0, "pair", "--machines", "2")
    for joiner in (1, 2):
        session.join(waiting, joiner)
        session.lines += ["", f"# and on {NAMES[0]}:"]
    waiting.close()
    yield block()
    session.until(lambda: machines.agree(range(3)), "all agree")
    session.until(lambda: machines.are_links_measured(3), "all links are measured")
    session.type(0, "status")
    session.type(0, "doctor")
    yield block()
    view = session.open(0, "run", "train.py")
    view.show_until("epoch", 3)
    session.lines.append("# The nas loses its power.")
    nas = lab.hosts[2]
    for other in lab.hosts[:2]:
        lab.cut(other, nas)  # a machine without power does not even refuse
    nas.kill_all()
    view.show_until("disappeared")
    view.show_until("epoch", 2)
    yield block()
    match = RUN_NAME.search(view.output)
    assert match is not None, view.output
    run = match[1]
    session.type(1, "ps")
    session.type(1, "logs", run)
    session.type(1, "stop", run)
    session.lines.append("# and on mac:")
    view.close()
    yield block()
    resumed = RUN_NAME.search(session.type(0, "resume", run))
    assert resumed is not None
    yield block()
    session.type(0, "export", resumed[1], "spiral-model")
    yield block()


def ten_minutes(readme: str) -> str:
    """Return the terminal output that the README shows."""
    return "\n".join(_SHOWN.findall(_section(readme, _TEN_MINUTES)))


def failing_session(readme: str) -> str:
    """Return the terminal output of the README about a worker that fails."""
    return "\n".join(_SHOWN.findall(_section(readme, _FAILING)))


def shown_script(readme: str, heading: str = _TEN_MINUTES) -> str:
    """Return the script that a section of the README shows."""
    match = _SCRIPT.search(_section(readme, heading))
    assert match is not None, f"the README shows no script in {heading}"
    return match[1]


def _section(readme: str, heading: str) -> str:
    match = re.search(rf"(?<=^## {heading}\n).*?(?=^## )", readme, re.MULTILINE | re.DOTALL)
    assert match is not None, f"the README has no section {heading}, or nothing after it"
    return match[0]


def _with_blocks(readme: str, heading: str, blocks: list[str]) -> str:
    section = _section(readme, heading)
    assert len(_SHOWN.findall(section)) == len(blocks), f"the README needs {len(blocks)} blocks of a terminal"
    rest = iter(blocks)
    filled = _SHOWN.sub(lambda _: f"```console\n{next(rest)}```", section)
    return readme.replace(section, filled)


def normal(text: str) -> list[str]:
    """Return the words of a transcript that must be the same each time, without figures, ids and drawing
    order.
    """
    text = re.sub(r"[0-9A-Z]{4}(-[0-9A-Z]{4})+", "ID", text)
    text = re.sub(r"\b\d+(?:-[a-z]+){3}\b", "CODE", text)
    text = re.sub(r"\btrain-[0-9a-z]{4}\b", "RUN", text)
    text = re.sub(r"cluster [0-9a-f]{8}", "cluster CLUSTER", text)
    text = re.sub(r"^[A-D]  ", "LETTER  ", text, flags=re.MULTILINE)
    text = re.sub(r"^(LETTER +\w+ +).* \(cpu\)", r"\1PROCESSOR (cpu)", text, flags=re.MULTILINE)
    text = re.sub(r"^[^A-Za-z0-9#]*[●○◉═─│┃╌┄┼ ]{3,}", "RUNG ", text, flags=re.MULTILINE)
    for words in _SAID_OR_NOT:
        text = re.sub(words, "", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=, which is on )\w+(, \w+)*", "WHERE", text)
    text = re.sub(r"(?<=machines )\d$", lambda count: "I" * int(count[0]), text, flags=re.MULTILINE)
    text = re.sub(r" +slowest$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\b(fd00::|10\.80\.)[0-9a-f.:]+", "N", text)
    text = re.sub(r"^(ok|warn) +(disk|sleep|stalls|torch|firewall|gpu) .*", r"\2", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=GiB), [0-9.]+ TFLOPS", "", text)  # appears once the first measurement is in
    text = re.sub(r"^  .* \(cpu\), .*|linux x86_64.*", "HARDWARE", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=\S)  +\S(?:(?!  ).)* GiB$", " HARDWARE", text, flags=re.MULTILINE)
    text = re.sub(r"\w*…$", "…", text, flags=re.MULTILINE)  # a cell is cut where the columns before it end
    text = re.sub(r"\d+(,\d{3})*(\.\d+)*(e[+-]\d+)?", "N", text)
    text = re.sub(r"N (ms|us|µs|s|min)\b", "N", text)
    text = re.sub(r"\bN [GMk]bit/s", "N", text)
    text = re.sub(r"\bN (warning|failure)s?\b", r"N \1", text)
    text = re.sub(r"^disk: Barnraise uses .*", "DISK", text, flags=re.MULTILINE)
    # What is measured of a link appears when it has been.
    text = re.sub(r"\b(online|online, guest|away|away, guest|this machine)(\s+(N|-)(?=\s))+", r"\1", text)
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    # How many epochs pass until something else happens differs.
    once = dict.fromkeys(line for line in lines if " epoch " in f" {line}")
    return sorted([*once, *(line for line in lines if line not in once)])


def _plain(text: str, machines: Machines) -> str:
    """Replace the lab's paths by those of a reader's machine."""
    for place, name in enumerate(NAMES[: len(machines.hosts)]):
        text = text.replace(str(machines.state(place)), f"/home/{name}/.local/state/barnraise")
    return text


@dataclass(frozen=True)
class Document:
    """A file that shows a session, and how the session is made."""

    file: Path
    record: Callable[[], Recording]
    shown: Callable[[str], str]  # of the file, what is shown of terminals


DOCUMENTS = {
    "cluster": Document(CLUSTER, record_cluster, str),
    "readme": Document(README, record_readme, ten_minutes),
    "failing": Document(README, record_failing, failing_session),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("which", nargs="?", choices=DOCUMENTS, help="one of them (default: all)")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for document in [DOCUMENTS[options.which]] if options.which else DOCUMENTS.values():
        text = document.record().text
        print(document.shown(text), flush=True)
        if options.write:
            document.file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
