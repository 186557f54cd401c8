"""Time from `barnraise run` to the script, and bytes that a second run sends, on four hosts at 1 Gbit/s.

    python -m benchmarks.cluster.run_start --quick     about 2 minutes
    python -m benchmarks.cluster.run_start             more rounds

The start of a run is from the command's start to the script's first line on the last worker. Against
torchrun: from the command to the end of the first all-reduce of an unmodified program, on the same four
hosts, in turns. The last line is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import MARK, CommandLine, first_lines, start_torchrun, write_folder
from benchmarks.report import environment_line, last_line, table
from lab import Lab

HOSTS = 4
FILES = 200
_MEASURING = 500_000  # more bytes than this at once: an agent measured a link again during the run
FIRST_REDUCE = """\
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 4.0
with open(os.path.join(os.environ["MARKS"], "first-" + os.environ["RANK"]), "w") as mark:
    mark.write(repr(time.time()))
dist.barrier()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rounds = 3 if options.quick else 9
    print(environment_line())
    with (
        tempfile.TemporaryDirectory(prefix="by-run-") as directory,
        Lab(hosts=HOSTS, rate="1gbit") as lab,
        Machines(lab.hosts) as machines,
    ):
        machines.form()
        # Agents measure their links once after they have met; that traffic is not a run's.
        machines.until(lambda: machines.are_links_measured(6), 300.0, "links are measured")
        bench = Bench(machines, Path(directory))
        firsts, seconds, sent = bench.starts(rounds)
        ours, theirs = bench.against_torchrun(rounds)
    rows = [
        ["first start, 200 files", *_spread(firsts)],
        ["second start, unchanged", *_spread(seconds)],
        ["ours to the first all-reduce", *_spread(ours)],
        ["torchrun to the first all-reduce", *_spread(theirs)],
    ]
    print(table(["seconds", "median", "least", "most"], rows))
    alone = [count for count in sent if count < _MEASURING] or sent
    print(f"bytes received by each node in a second start: {', '.join(f'{count:,}' for count in sent)}")
    last_line(
        {
            "first_start_s": statistics.median(firsts),
            "second_start_s": statistics.median(seconds),
            "second_bytes_per_node": max(alone),
            "startup_over_torchrun_s": statistics.median(ours) - statistics.median(theirs),
        }
    )
    return 0


def _spread(values: list[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]


class Bench:
    """One formed cluster and its folders."""

    def __init__(self, machines: Machines, directory: Path) -> None:
        self._machines = machines
        self._line = CommandLine(machines)
        self._directory = directory
        self._serial = 0

    def starts(self, rounds: int) -> tuple[list[float], list[float], list[int]]:
        """Time the starts of new folders, each run twice: first runs, second runs, and bytes sent by second
        runs.
        """
        firsts, seconds, sent = [], [], []
        for number in range(rounds):
            folder = self._directory / f"project{number}"
            write_folder(folder, f"{MARK}# {number}\n", files=FILES)
            for path in (folder / "parts").iterdir():
                path.write_text(f"{path.read_text()}# {number}\n")
            firsts.append(self._start(folder))
            before = self._received()
            seconds.append(self._start(folder))
            after = self._received()
            sent.append(max(late - early for early, late in zip(before, after, strict=True)))
        return firsts, seconds, sent

    def _start(self, folder: Path) -> float:
        marks = self._marks()
        begin = time.time()
        running = self._line.start(0, "run", "--set", f"MARKS={marks}", "train.py", folder=folder)
        took = max(first_lines(marks, HOSTS, 60.0)) - begin
        if running.wait(60) != 0:
            raise SystemExit(running.output())
        return took

    def _received(self) -> list[int]:
        """Return the bytes that each host but the first has received on its network card."""
        counts = []
        for host in self._machines.hosts[1:]:
            text = host.run(["cat", "/proc/net/dev"]).stdout
            cards = [line.split(":") for line in text.splitlines() if ":" in line]
            counts.append(sum(int(rest.split()[0]) for name, rest in cards if name.strip() != "lo"))
        return counts

    def against_torchrun(self, rounds: int) -> tuple[list[float], list[float]]:
        folder = self._directory / "unmodified"
        write_folder(folder, FIRST_REDUCE)
        ours, theirs = [], []
        for _ in range(rounds):
            ours.append(self._start(folder))
            theirs.append(self._torchrun(folder))
        return ours, theirs

    def _torchrun(self, folder: Path) -> float:
        marks = self._marks()
        begin = time.time()
        started = start_torchrun(self._machines, [folder] * HOSTS, ["train.py"], {"MARKS": str(marks)})
        took = max(first_lines(marks, HOSTS, 90.0)) - begin
        for process in started:
            process.wait(60)
        return took

    def _marks(self) -> Path:
        self._serial += 1
        marks = self._directory / f"marks{self._serial}"
        shutil.rmtree(marks, ignore_errors=True)
        marks.mkdir()
        return marks


if __name__ == "__main__":
    sys.exit(main())
