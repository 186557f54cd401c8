"""24 jobs on three hosts, while a worker is killed, a machine loses its power, and the coordinator restarts.

    python -m benchmarks.queue --quick     about 2 minutes
    python -m benchmarks.queue             longer jobs

A job waits for a few seconds instead of computing, because two cores carry all hosts. A host is idle while
its agent is a member, a job waits for a free machine, and no script runs there. So the start of a worker
counts as idle. The last line is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

from barnraise.agent_client.queue.requests import JobRow, ListJobsRequest, QueueResponse
from barnraise.core.errors import BarnraiseError
from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine
from benchmarks.report import environment_line, last_line, table
from lab import Lab

HOSTS = 3
JOBS = 24
SCRIPT = """
import json, os, sys, time
from pathlib import Path
marks, seed, seconds = Path(sys.argv[1]), sys.argv[3], float(sys.argv[4])
name = f"{seed}-{os.getpid()}"
mark = {"pid": os.getpid(), "run": os.environ["BARNRAISE_RUN"], "node": os.environ["BARNRAISE_NODE"]}
(marks / f".{name}").write_text(json.dumps(mark))
os.rename(marks / f".{name}", marks / f"start-{name}")
time.sleep(seconds)
Path("result.txt").write_text(seed)
(marks / f"done-{name}").touch()
"""


class IdleMonitor:
    """Thread that looks at all hosts several times a second, and keeps the longest idle time."""

    def __init__(self, machines: Machines, marks: Path) -> None:
        self._machines = machines
        self._marks = marks
        self._idle_since: dict[str, float] = {}
        self._is_closing = threading.Event()
        self.names: dict[str, str] = {}  # of the hosts, by node
        self.longest_s = 0.0
        self.idle_s: Counter[str] = Counter()
        self.rows: tuple[JobRow, ...] = ()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> IdleMonitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing.set()
        self._thread.join()

    def _run(self) -> None:
        seen = time.monotonic()
        while not self._is_closing.wait(0.2):
            now = time.monotonic()
            self._look(now, now - seen)
            seen = now

    def _look(self, now: float, passed_s: float) -> None:
        for place in range(HOSTS):
            try:
                status = self._machines.status(place)
                self.rows = self._machines.ask(place, ListJobsRequest(), QueueResponse).jobs
            except (BarnraiseError, OSError):
                continue
            break
        else:
            return
        members = {row.name for row in status.nodes if row.seniority is not None}
        self.names |= {row.node: row.name for row in status.nodes}
        is_waited = any(row.state == "waiting" and row.why == "waits for a free machine" for row in self.rows)
        idle = members - self.busy() if is_waited else set()
        self._idle_since = {name: self._idle_since.get(name, now) for name in idle}
        for name, since in self._idle_since.items():
            self.longest_s = max(self.longest_s, now - since)
            self.idle_s[name] += passed_s  # type: ignore[assignment]  # seconds

    def busy(self) -> set[str]:
        """Return the hosts on which a script runs now."""
        by_run = {row.run: row.machines[0] for row in self.rows if row.machines}
        return {by_run[run] for run, _ in self.scripts() if run in by_run}

    def scripts(self) -> list[tuple[str, int]]:
        """Return run and process of each script that runs now."""
        running = []
        for path in self._marks.glob("start-*"):
            mark = json.loads(path.read_text())
            is_over = (self._marks / path.name.replace("start", "done", 1)).exists()
            if not is_over and psutil.pid_exists(mark["pid"]):
                running.append((mark["run"], mark["pid"]))
        return running


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    seconds = 6 if options.quick else 20
    print(environment_line())
    with (
        tempfile.TemporaryDirectory(prefix="by-queue-") as directory,
        Lab(hosts=HOSTS, rate="1gbit") as lab,
        Machines(lab.hosts) as machines,
    ):
        marks = Path(directory) / "marks"
        folder = Path(directory) / "project"
        marks.mkdir()
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        machines.form()
        machines.until(lambda: machines.are_links_measured(HOSTS), 300.0, "links are measured")
        figures = _play(machines, folder, marks, seconds)
    print(table(["figure", "value"], [[name, str(value)] for name, value in figures.items()]))
    last_line(figures)
    return 0


def _play(machines: Machines, folder: Path, marks: Path, seconds: int) -> dict[str, object]:
    line = CommandLine(machines)
    words = ["train.py", str(marks), "--seed", f"1..{JOBS}", str(seconds)]
    added = line.run(1, "queue", "add", "--env", "agent", *words, folder=folder)
    if added.returncode != 0:
        raise SystemExit(added.stderr)
    begin = time.monotonic()
    with IdleMonitor(machines, marks) as monitor:
        machines.until(lambda: len(monitor.scripts()) == HOSTS, 60.0, "all hosts work")
        _kill_worker(monitor)
        machines.until(lambda: _done(marks) >= JOBS // 4, 300.0, "a quarter is done")
        machines.kill(2)
        machines.hosts[2].kill_all()
        machines.until(lambda: _done(marks) >= JOBS // 2, 300.0, "half is done")
        machines.start(2)
        machines.until(lambda: _done(marks) >= 5 * JOBS // 8, 300.0, "five eighths are done")
        _restart_agent(machines, int(machines.status(1).coordinator.removeprefix("h")))
        machines.until(lambda: _has_ended(monitor), 600.0, "all jobs have ended")
        took_s = time.monotonic() - begin
    states = Counter(row.state for row in monitor.rows)
    finished = Counter(path.name.split("-")[1] for path in marks.glob("done-*"))
    brought = line.run(0, "queue", "results", folder=folder, timeout=300.0)
    results = len(list((folder / "barnraise-runs").glob("*/result.txt")))
    if brought.returncode != 0:
        print(brought.stderr)
    return {
        "jobs_done": states["done"],
        "jobs_lost": JOBS - sum(states[state] for state in ("done", "failed", "cancelled")),
        "jobs_doubled": sum(count - 1 for count in finished.values()),
        "longest_idle_s": round(monitor.longest_s, 2),
        "idle_s_per_host": round(sum(monitor.idle_s.values()) / HOSTS, 1),
        "results": results,
        "attempts": sum(row.tries for row in monitor.rows),
        "seconds": round(took_s, 1),
        "seconds_of_work": round(JOBS * seconds / HOSTS, 1),
    }


def _done(marks: Path) -> int:
    return len(list(marks.glob("done-*")))


def _has_ended(monitor: IdleMonitor) -> bool:
    states = [row.state for row in monitor.rows]
    return len(states) == JOBS and not {"waiting", "running"} & set(states)


def _kill_worker(monitor: IdleMonitor) -> None:
    _, pid = monitor.scripts()[0]
    psutil.Process(pid).send_signal(signal.SIGKILL)


def _restart_agent(machines: Machines, place: int) -> None:
    """Stop an agent as a service does, and start it again."""
    process = machines.process(place)
    process.signal(signal.SIGTERM)
    process.wait(60)
    machines.agents[place] = None
    machines.start(place)


if __name__ == "__main__":
    sys.exit(main())
