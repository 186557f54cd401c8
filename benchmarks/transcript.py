"""A first session with four machines, typed by a script into the real commands on lab hosts.

    python -m benchmarks.transcript            print it
    python -m benchmarks.transcript --write    and put it into docs/transcripts/first-cluster.txt

A test runs it again and compares, apart from what differs each time: ids, codes, figures, paths.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.machines import REPOSITORY, Machines
from lab import Lab

FILE = REPOSITORY / "docs" / "transcripts" / "first-cluster.txt"
NAMES = ("mac", "pc", "nas", "laptop")
_CODE = re.compile(r"backyard join (\d+-[a-z]+-[a-z]+)")


class Session:
    """What was typed where, and what came."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines += ["", f"# {text}"]

    def type(self, place: int, *words: str) -> str:
        """Run a command to its end."""
        return self._take(place, words, self._start(place, words))

    def pair(self, owner: int, joiner: int, *options: str) -> None:
        """Two terminals: one waits while the other types the code."""
        words = ("pair", *options)
        waiting = self._start(owner, words)
        assert waiting.stdout is not None
        shown = waiting.stdout.readline()
        code = _CODE.search(shown)
        assert code is not None, shown
        self._prompt(owner, words)
        self.lines.append(shown.rstrip())
        while "good for one guess" not in shown:
            shown = waiting.stdout.readline()
            self.lines.append(shown.rstrip())
        self.type(joiner, "join", code[1])
        self.lines.append(f"# and on {NAMES[owner]}:")
        self.lines += waiting.communicate(timeout=60)[0].rstrip().splitlines()

    def until(self, place: int, truth: Callable[[], bool], what: str) -> None:
        self._machines.until(truth, 60.0, f"{what} on {NAMES[place]}")

    def _start(self, place: int, words: tuple[str, ...]) -> subprocess.Popen[str]:
        namespace = self._machines.hosts[place].namespace
        command = [sys.executable, "-m", "backyard.cli.main", *words]
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, *command],
            env=self._machines.environment(place),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _take(self, place: int, words: tuple[str, ...], process: subprocess.Popen[str]) -> str:
        output = process.communicate(timeout=120)[0]
        self._prompt(place, words)
        self.lines += output.rstrip().splitlines()
        return output

    def _prompt(self, place: int, words: tuple[str, ...]) -> None:
        self.lines += ["", f"{NAMES[place]}$ backyard {' '.join(words)}"]


def record() -> str:
    """The whole session."""
    with Lab(hosts=4) as lab, Machines(lab.hosts) as machines:
        session = Session(machines)
        session.say("Four machines on one network; nobody types an address.")
        for place, name in enumerate(NAMES):
            session.type(place, "up", "--detach")
            session.type(place, "rename", name)
        session.pair(0, 1)
        session.pair(0, 2)
        session.say("The friend's laptop becomes a guest.")
        session.pair(0, 3, "--guest")
        session.until(0, lambda: machines.agree(range(4)), "all agree")
        session.until(0, lambda: _is_measured(machines), "all links are measured")
        session.type(0, "status")
        session.type(0, "status", "--graph")
        session.type(2, "nodes")
        session.type(1, "doctor")
        session.say("The laptop leaves.")
        session.type(3, "down")
        session.type(0, "status")
        session.say("The mac, which coordinates, loses its power.")
        os.kill(machines.status(0).pid, signal.SIGKILL)
        session.until(1, lambda: machines.status(1).coordinator == "pc", "pc coordinates")
        session.type(1, "status")
        session.say("It comes back by itself.")
        session.type(0, "up", "--detach")
        session.until(1, lambda: machines.agree([0, 1, 2]), "mac is back")
        session.type(1, "status")
        session.say("The laptop is not wanted any more; it cannot return.")
        session.type(0, "unpair", "laptop", "--yes")
        session.type(0, "nodes")
        session.say("A wrong code is burned after one guess. (The laptop starts anew first.)")
        session.type(3, "up", "--detach")
        session.type(3, "leave", "--yes")
        session.type(3, "up", "--detach")
        code = session.type(0, "pair", "--no-wait")
        found = _CODE.search(code)
        assert found is not None
        number, first, second = found[1].split("-")
        session.type(3, "join", f"{number}-{second}-{first}")
        for place in range(4):
            session.type(place, "down")
        return _plain("\n".join(session.lines).strip() + "\n", machines)


def normal(text: str) -> list[str]:
    """What must be the same each time: the words. Not figures, nor their order in the picture."""
    text = re.sub(r"[0-9A-Z]{4}(-[0-9A-Z]{4})+", "ID", text)
    text = re.sub(r"\b\d+-[a-z]+-[a-z]+\b", "CODE", text)
    text = re.sub(r"cluster [0-9a-f]{8}", "cluster CLUSTER", text)
    text = re.sub(r"^[A-D]  ", "LETTER  ", text, flags=re.MULTILINE)
    text = re.sub(r"^[^A-Za-z0-9#]*[●○◉═─│┃╌┄┼ ]{3,}", "RUNG ", text, flags=re.MULTILINE)
    text = re.sub(r" +slowest$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\b(fd00::|10\.80\.)[0-9a-f.:]+", "N", text)
    text = re.sub(
        r"^(ok|warn) +(disk|sleep|stalls|torch|firewall|gpu) .*", r"\1 \2", text, flags=re.MULTILINE
    )
    text = re.sub(r"; Intel.*|linux x86_64.*", "HARDWARE", text)
    text = re.sub(r"\d+(\.\d+)*", "N", text)
    text = re.sub(r"N (ms|us|µs|s)\b", "N", text)
    text = re.sub(r"\bN [GMk]bit/s", "N", text)
    text = re.sub(r"\b(N|-)(?= |$)", "N", text, flags=re.MULTILINE)
    return sorted(" ".join(line.split()) for line in text.splitlines() if line.strip())


def _plain(text: str, machines: Machines) -> str:
    """The lab's paths as a reader would have them."""
    for place, name in enumerate(NAMES):
        text = text.replace(str(machines.state(place)), f"/home/{name}/.local/state/backyard")
    return text


def _is_measured(machines: Machines) -> bool:
    told = machines.status(0)
    return len(told.links) == 6 and all(link.mbps is not None for link in told.links)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    text = record()
    print(text)
    if options.write:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        Path(FILE).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
