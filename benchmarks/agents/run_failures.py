"""Transcripts of failing runs: each case on two lab hosts, typed into the real commands.

    python -m benchmarks.agents.run_failures            print them
    python -m benchmarks.agents.run_failures --write    and put them into docs/transcripts/run-failures.txt

After each case no process of the run may be left on any host.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine, write_folder
from lab import Lab, LabProcess

FILE = REPOSITORY / "docs" / "transcripts" / "run-failures.txt"
NAMES = ("mac", "pc")
_ON_RANK_1 = "import os\nif os.environ['RANK'] == '1':\n    "
_SMALL_DISK = "24m"


@dataclass(frozen=True)
class Case:
    """A script that fails, and the expected messages about it."""

    title: str
    script: str
    options: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    code: int = 1
    stops_after_s: float = 0.0
    fills_disk: bool = False


CASES = (
    Case(
        "A worker raises",
        f"{_ON_RANK_1}raise ValueError('the loss is not a number')\nimport time\ntime.sleep(60)\n",
        says=("last output of rank 1 on pc", "ValueError: the loss is not a number", "(train.py:3), on pc"),
    ),
    Case(
        "A worker is killed, again and again",
        f"{_ON_RANK_1}os.kill(os.getpid(), 9)\nimport time\ntime.sleep(60)\n",
        options=("--restarts", "1"),
        says=("rank 1 on pc was killed by signal 9", "no restart is left"),
        code=128 + signal.SIGKILL,
    ),
    Case(
        "A worker runs out of the memory that it may have",
        f"{_ON_RANK_1}\n    hoard = [bytearray(1 << 24) for _ in range(100)]\nimport time\ntime.sleep(60)\n",
        options=("--memory", "256MB"),
        says=("MemoryError", "last output of rank 1 on pc"),
    ),
    Case(
        "A worker floods its output",
        "import time\nend = time.monotonic() + 3\nline = 'x' * 4095\n"
        "while time.monotonic() < end:\n    print(line)\nprint('the end')\n",
        says=("of output are left out here", "the end", "finished successfully"),
        code=0,
    ),
    Case(
        "A worker does not listen when it is stopped",
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf')\ntime.sleep(60)\n",
        says=("stopped from mac",),
        code=130,
        stops_after_s=1.0,
    ),
    Case(
        "A disk is full",
        "import os\nwith open('checkpoint.bin', 'wb') as file:\n    for _ in range(64):\n"
        "        file.write(os.urandom(1 << 20))\nimport time\ntime.sleep(60)\n",
        says=("No space left on device", "on pc"),
        fills_disk=True,
    ),
    Case(
        "The script has a syntax error",
        "print('begin')\nfor step in range(10)\n    print(step)\n",
        says=("train.py line 2", "nothing was sent or started"),
    ),
    Case(
        "A package is missing on one machine only",
        "import only_on_the_mac\nprint('the mac works alone')\n",
        says=("pc takes no part", "only_on_the_mac is missing", "started: 1 worker on 1 machine"),
        code=0,
    ),
)


@contextmanager
def two_machines() -> Iterator[tuple[CommandLine, Path]]:
    """Start a cluster of two machines, where the first has a package that the second lacks."""
    with (
        tempfile.TemporaryDirectory(prefix="by-f-") as directory,
        Lab(hosts=2) as lab,
        Machines(lab.hosts) as machines,
    ):
        only = Path(directory) / "only"
        only.mkdir()
        (only / "only_on_the_mac.py").write_text("")
        for place, name in enumerate(NAMES):
            machines.more_path = (str(only),) if place == 0 else ()
            machines.start(place)
            machines.rename(place, name)
        machines.pair(0, 1)
        machines.until(lambda: machines.agree(range(2)), 60.0, "both agree")
        yield CommandLine(machines), Path(directory)


def play(line: CommandLine, directory: Path, case: Case) -> tuple[int, str]:
    """Run one case and return the exit code and the whole output."""
    folder = directory / f"project{len(list(directory.iterdir()))}"
    write_folder(folder, case.script)
    with _small_disk(line.machines, case.fills_disk):
        running = line.start(0, "run", *case.options, "train.py", folder=folder)
        if case.stops_after_s:
            _interrupt(running, case.stops_after_s)
        code = running.wait(200)
        line.machines.until(lambda: not left_over(line.machines), 30.0, "nothing is left running")
    return code, running.output()


def _interrupt(running: LabProcess, after_s: float) -> None:
    """Send Ctrl-C twice, a second apart."""
    deadline = time.monotonic() + 120
    while "deaf" not in running.output() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(after_s)
    for _ in range(2):
        running.signal(signal.SIGINT, group=True)
        time.sleep(1.0)


@contextmanager
def _small_disk(machines: Machines, wanted: bool) -> Iterator[None]:
    """Put the runs of the second machine on a disk that is nearly full."""
    if not wanted:
        yield
        return
    place = machines.state(1) / "runs"
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SMALL_DISK}", "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def left_over(machines: Machines) -> list[str]:
    """Return the processes on the hosts whose working folder belongs to a run."""
    processes = []
    for host in machines.hosts:
        for pid in host.pids():
            try:
                if "/runs/" in (where := psutil.Process(pid).cwd()):
                    processes.append(f"{pid} in {where}")
            except psutil.Error:
                continue
    return processes


def shown(case: Case, seen: str) -> str:
    """Format the output as the documentation shows it; very long lines are cut."""
    lines: list[str] = []
    # The paths of the recording machine do not matter to a reader.
    seen = re.sub(r"/tmp/by-m-\w+/\d", "~/.local/state/barnraise", seen).replace(sys.executable, "python")
    for line in seen.splitlines():
        if len(line) > 400 and lines and lines[-1].endswith(" ..."):
            continue
        lines.append(line if len(line) <= 400 else f"{line[:60]} ...")
    typed = " ".join(["barnraise run", *case.options, "train.py"])
    return "\n".join([f"# {case.title}", f"mac$ {typed}", *lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    texts = []
    with two_machines() as (line, directory):
        for case in CASES:
            code, seen = play(line, directory, case)
            texts.append(shown(case, seen))
            print(texts[-1], f"(exit code {code})", flush=True)
    if options.write:
        FILE.write_text("\n".join(texts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
