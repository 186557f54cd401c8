"""Time to send a data set from one machine to three others at 1 Gbit/s, and the bytes its sender sends.

    python -m benchmarks.cluster.data_transfer --quick     1 GB, twice
    python -m benchmarks.cluster.data_transfer             1 GB, five times

The time is from the start of the run until the last machine has every byte on its disk, verified. Packing on
the sender happens before. Because peers forward to peers, each peer could receive at the whole rate of the
sender's line; the measured speed is divided by that rate. The last line is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from barnraise.agent_client.run_requests import RunsRequest, RunsResponse, WatchRequest, WatchResponse
from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine, write_folder
from benchmarks.report import environment_line, last_line, table
from lab import Lab, LabProcess

HOSTS = 4
RATE_BITS = 1e9
SIZE = 1_000_000_000
FILE = 50_000_000
_ARRIVAL_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    print(environment_line())
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="by-ship-") as directory,
        Lab(hosts=HOSTS, rate="1gbit") as lab,
        Machines(lab.hosts) as machines,
    ):
        machines.form()
        for number in range(2 if options.quick else 5):
            rows.append(_once(machines, Path(directory), number))
            print(table(["seconds", "sent over size", "CPU seconds"], [rows[-1]]), flush=True)
    seconds = statistics.median(row[0] for row in rows)
    ideal = SIZE * 8 / RATE_BITS
    last_line(
        {
            "ship_seconds": seconds,
            "ship_share_of_link": ideal / seconds,
            "ship_sent_over_size": statistics.median(row[1] for row in rows),
            "ship_cpu_seconds": statistics.median(row[2] for row in rows),
            "ship_seconds_spread": [min(row[0] for row in rows), max(row[0] for row in rows)],
        }
    )
    return 0


def _once(machines: Machines, directory: Path, number: int) -> tuple[float, float, float]:
    data, project = directory / f"data{number}", directory / f"project{number}"
    data.mkdir()
    for part in range(SIZE // FILE):
        (data / f"part{part:03}.bin").write_bytes(os.urandom(FILE))
    write_folder(project, "print('here')\n")
    line = CommandLine(machines)
    known = names_of_runs(machines)
    before = _sent(machines), _cpu(machines)
    running = line.start(0, "run", "--data", f"blob={data}", "--wait", "60s", "train.py", folder=project)
    took = seconds_to_arrive(machines, known, running)
    after = _sent(machines), _cpu(machines)
    if running.wait(120) != 0:
        raise SystemExit(running.output())
    for path in data.iterdir():
        path.unlink()
    return took, (after[0] - before[0]) / SIZE, after[1] - before[1]


def names_of_runs(machines: Machines) -> set[str]:
    """Return the names of the runs that the first machine knows."""
    return {row.run for row in machines.ask(0, RunsRequest(), RunsResponse).runs}


def seconds_to_arrive(machines: Machines, known: set[str], running: LabProcess) -> float:
    """Return the seconds from the start of a run until each of its machines has all files.

    ``known``: names of the runs before it. ``running``: the command that starts it.
    """
    new: set[str] = set()
    while not new:
        if running.poll() is not None:
            raise SystemExit(f"the command started no run:\n{running.output()}")
        time.sleep(0.02)
        new = names_of_runs(machines) - known
    (run,) = new
    begin = time.monotonic()
    while not _all_here(machines, run):
        if running.poll() is not None or time.monotonic() - begin > _ARRIVAL_S:
            raise SystemExit(f"the files did not arrive on all machines:\n{running.output()}")
        time.sleep(0.05)
    return time.monotonic() - begin


def _all_here(machines: Machines, run: str) -> bool:
    response = machines.ask(0, WatchRequest(run=run, wait_s=0), WatchResponse)
    stages = {part.stage for part in response.parts}
    return bool(response.workers) or stages <= {"ready", "running", "ended"}


def _sent(machines: Machines) -> int:
    text = machines.hosts[0].run(["cat", "/proc/net/dev"]).stdout
    card = next(line for line in text.splitlines() if line.strip().startswith("eth0"))
    return int(card.split(":")[1].split()[8])


def _cpu(machines: Machines) -> float:
    """Return the CPU seconds of all agents together."""
    total = 0.0
    for host in machines.hosts:
        for pid in host.pids():
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system
    return total


if __name__ == "__main__":
    sys.exit(main())
