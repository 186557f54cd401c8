"""Barnraise and torchft 0.2.0 side by side: the same loop, the same four lab hosts, the same faults.

    python -m benchmarks.against.torchft --torchft-python /tmp/ft/bin/python --quick    about 6 minutes
    python -m benchmarks.against.torchft --torchft-python /tmp/ft/bin/python

The loop is the transformer of tests/lab/session_program.py (benchmarks/programs/torchft_loop.py for torchft),
24 samples a step. Each fault hits four members that have trained undisturbed for some seconds. With torchft's
default settings most of a recovery is a timeout of 60 s, so the next cluster is started meanwhile. torchft
needs an environment of its own; without it the benchmark prints how to create one. The last line is one JSON
object of figures. On our side no sample may be lost or counted twice, and no state may be unequal.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.against.torchft_clusters import (
    DEFAULT,
    DEFAULT_DDP,
    EXAMPLE,
    HOSTS,
    SHORT,
    Ours,
    Settings,
    Torchft,
    Trace,
    ours,
    torchft,
)
from benchmarks.agents.commits import Commit, judge
from benchmarks.report import environment_line, last_line, table
from benchmarks.session.soak import UNITS
from lab import Host

INSTALL = """\
    python3.11 -m venv /tmp/ft
    /tmp/ft/bin/pip install torch==2.13.0 numpy opentelemetry-api opentelemetry-sdk \\
        opentelemetry-exporter-otlp-proto-http
    /tmp/ft/bin/pip install --no-deps torchft==0.2.0
    python -m benchmarks.against.torchft --torchft-python /tmp/ft/bin/python --quick"""
_UNIT_SAMPLES = 3
_SETTLED_S = 2.0
_RETURNS_S = 150.0
_POLL_S = 0.1


class Amount(NamedTuple):
    """Number of repetitions of each fault; ``variants``: repetitions with torchft's other settings."""

    kills: int
    default_kills: int
    variants: int
    coordinator_faults: int
    fault_free_s: float
    longest_s: float


FULL = Amount(5, 5, 2, 3, 10.0, 120.0)
QUICK = Amount(2, 1, 0, 1, 5.0, 65.0)


class Outcome(NamedTuple):
    """Result of one fault: seconds to the next commit, or to the exit of the last member able to commit."""

    commit_s: float | None
    ended_s: float | None = None


class Caused(NamedTuple):
    """A fault: the last commit before it, the processes that held the state, and when it was."""

    trace: Trace
    before: Commit
    held_by: list[int]
    begin: float
    any_group_from: float = math.inf  # for when groups may get the numbers of earlier ones


Side = Ours | Torchft
Plan = tuple[str, Settings, Callable[[Side], Caused]]
Waiting = tuple[str, Caused, ExitStack]


# what the trace tells


def settle(side: Side, meanwhile: Callable[[], None] = lambda: None) -> Commit:
    deadline = time.monotonic() + _RETURNS_S
    while time.monotonic() < deadline:
        meanwhile()
        commits = side.trace.commits()
        if commits and _is_settled(commits):
            time.sleep(random.uniform(0.0, 0.1))
            return side.trace.commits()[-1]
        time.sleep(_POLL_S)
    raise SystemExit(f"the four did not train together within {_RETURNS_S:g} s")


def _is_settled(commits: Sequence[Commit]) -> bool:
    """Return True if all four members have trained in one group for some seconds."""
    last = commits[-1]
    if last.world != HOSTS or time.time() - last.at > _SETTLED_S:
        return False
    return last.at - min(commit.at for commit in _of_last_group(commits)) > _SETTLED_S


def _of_last_group(commits: Sequence[Commit]) -> list[Commit]:
    number = commits[-1].generation
    return list(takewhile(lambda commit: commit.generation == number, reversed(commits)))


def cause(side: Side, fault: Callable[[list[int]], None]) -> Caused:
    before = settle(side)
    held_by = sorted({commit.pid for commit in _of_last_group(side.trace.commits())})
    begin = time.time()
    fault(held_by)
    return Caused(side.trace, before, held_by, begin)


def await_outcome(fault: Caused, longest_s: float) -> Outcome:
    while (known := outcome(fault, longest_s)) is None:
        time.sleep(_POLL_S)
    return known


def outcome(fault: Caused, longest_s: float) -> Outcome | None:
    """Return the outcome of a fault, or None if the outcome is not known yet."""
    for commit in fault.trace.since(fault.begin):
        is_later_group = commit.generation > fault.before.generation
        if (is_later_group or commit.at > fault.any_group_from) and commit.step >= fault.before.step:
            return Outcome(commit.at - fault.begin)
    took = time.time() - fault.begin
    if not any(_is_running(pid) for pid in fault.held_by):
        return Outcome(None, took)  # workers that start now have no state
    return Outcome(None) if took > longest_s else None


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def without_faults(side: Side, seconds: float) -> dict[str, float]:
    time.sleep(seconds)  # agents measure their links when they meet
    settle(side)
    begin, used = time.time(), _cpu_s(side)
    time.sleep(seconds)
    added = sum(value - used.get(pid, 0.0) for pid, value in _cpu_s(side).items())
    steps = len({commit.step for commit in side.trace.since(begin)})
    return {"steps_per_s": steps / seconds, "cpu_ms_per_step": 1000 * added / steps}


def _cpu_s(side: Side) -> dict[int, float]:
    times = {pid: psutil.Process(pid).cpu_times() for host in side.hosts for pid in host.pids()}
    return {pid: cpu_times.user + cpu_times.system for pid, cpu_times in times.items()}


def judged(side: Side, since: float) -> dict[str, int]:
    """Count lost and doubled samples and unequal states since a moment at which all four trained together."""
    verdict = judge(side.trace.since(since), UNITS)
    return {
        "samples": verdict.steps * UNITS * _UNIT_SAMPLES,
        "samples_lost": verdict.units_lost * _UNIT_SAMPLES,
        "samples_doubled": verdict.units_doubled * _UNIT_SAMPLES,
        "steps": verdict.steps,
        "steps_with_unequal_state": verdict.hash_violations,
    }


# the faults


def kill_worker(side: Side) -> Caused:
    return cause(side, lambda held_by: os.kill(random.choice(held_by), signal.SIGKILL))


def kill_coordinator(side: Side) -> Caused:
    host = side.coordinator()
    return cause(side, lambda _: host.kill_all())


def stop_coordinator(side: Side) -> Caused:
    """Send SIGSTOP to the coordinator's machine, including its worker."""
    host = side.coordinator()
    return cause(side, lambda _: _signal_all(host, signal.SIGSTOP))


def replace_lighthouse(side: Torchft) -> Caused:
    """Kill only the lighthouse, and start it again at the same address a second later."""
    caused = cause(side, lambda _: side.lighthouse.kill())
    time.sleep(1.0)
    side.lighthouse = side.start_lighthouse()
    return caused._replace(any_group_from=caused.begin + 1.0)


def _signal_all(host: Host, sent: signal.Signals) -> None:
    for pid in host.pids():
        os.kill(pid, sent)


def measure_ours(amount: Amount) -> dict[str, Any]:
    with ours() as side:
        since = settle(side).at
        figures = _speed_and_kills(side, amount)
        killed, stopped = [], []
        for _ in range(amount.coordinator_faults):
            settle(side)
            host = side.coordinator()
            killed.append(await_outcome(kill_coordinator(side), amount.longest_s))
            side.revive(host)
            settle(side)
            host = side.coordinator()
            stopped.append(await_outcome(stop_coordinator(side), amount.longest_s))
            _signal_all(host, signal.SIGCONT)
        settle(side)
        figures |= {"coordinator_killed": _summary(killed), "coordinator_stopped": _summary(stopped)}
        return figures | judged(side, since)


def measure_short(python: Path, amount: Amount) -> dict[str, Any]:
    with torchft(python, SHORT) as side:
        since = settle(side).at
        figures = _speed_and_kills(side, amount)
        settle(side)
        figures |= judged(side, since)
        replaced = []
        for _ in range(amount.coordinator_faults):
            replaced.append(await_outcome(replace_lighthouse(side), amount.longest_s))
        return figures | {"lighthouse_restarted": _summary(replaced)}


def _speed_and_kills(side: Side, amount: Amount) -> dict[str, Any]:
    speed = without_faults(side, amount.fault_free_s)
    killed = [await_outcome(kill_worker(side), amount.longest_s) for _ in range(amount.kills)]
    return {**speed, "worker_killed": _summary(killed)}


def measure_default(python: Path, amount: Amount) -> dict[str, Any]:
    plans: list[Plan] = [("coordinator_stopped", DEFAULT, stop_coordinator)] * amount.coordinator_faults
    plans += [("coordinator_killed", DEFAULT, kill_coordinator)] * amount.coordinator_faults
    plans += [("worker_killed", DEFAULT, kill_worker)] * amount.default_kills
    plans += [("ddp_worker_killed", DEFAULT_DDP, kill_worker)] * amount.variants
    plans += [("example_worker_killed", EXAMPLE, kill_worker)] * amount.variants
    waiting: list[Waiting] = []
    ended: list[tuple[str, Outcome]] = []
    with ExitStack() as stack:
        for name, settings, fault in plans:
            cluster = stack.enter_context(ExitStack())
            side = cluster.enter_context(torchft(python, settings))
            settle(side, lambda: _sort_out(waiting, ended, amount.longest_s))
            waiting.append((name, fault(side), cluster))
        while waiting:
            _sort_out(waiting, ended, amount.longest_s)
            time.sleep(_POLL_S)
    names = dict.fromkeys(name for name, _, _ in plans)
    return {name: _summary([result for other, result in ended if other == name]) for name in names}


def _sort_out(waiting: list[Waiting], ended: list[tuple[str, Outcome]], longest_s: float) -> None:
    """Stop the clusters whose outcome is known, so that the next cluster has the cores to itself."""
    for entry in tuple(waiting):
        name, fault, cluster = entry
        if (known := outcome(fault, longest_s)) is not None:
            print(f"{time.strftime('%X')} torchft, {name}: {known}", flush=True)
            ended.append((name, known))
            waiting.remove(entry)
            cluster.close()


def _summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    took = sorted(math.inf if result.commit_s is None else result.commit_s for result in outcomes)
    middle, worst = statistics.median(took), took[-1]
    return {
        "seconds": [result.commit_s for result in outcomes],
        "median_s": middle if middle < math.inf else None,
        "worst_s": worst if worst < math.inf else None,
        "all_ended_s": [result.ended_s for result in outcomes if result.ended_s is not None],
    }


def _cell(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    both = ["none" if value[name] is None else f"{value[name]:.2f}" for name in ("median_s", "worst_s")]
    return f"{' / '.join(both)} ({len(value['seconds'])})"


def check_torchft(python: Path) -> None:
    """Check that torchft is installed for this Python; raise SystemExit with instructions if it is not.

    The wheels of torchft are for Linux on x86-64. The instructions install torchft without its dependencies,
    so that both sides use the same torch.
    """
    tried = subprocess.run([str(python), "-c", "import torchft"], capture_output=True, text=True, check=False)
    if tried.returncode or not (python.parent / "torchft_lighthouse").exists():
        words = tried.stderr.strip().rpartition("\n")[2] or "there is no torchft_lighthouse beside it"
        raise SystemExit(f"{python} has no torchft ({words}). Make an environment for it:\n\n{INSTALL}")


ROWS = {
    "worker_killed": "worker killed: next commit, s, median / worst (times)",
    "example_worker_killed": "the same with the settings of torchft's example",
    "ddp_worker_killed": "the same with torchft's DistributedDataParallel",
    "coordinator_killed": "coordinator's or lighthouse's host killed",
    "coordinator_stopped": "the same host stopped (SIGSTOP)",
    "lighthouse_restarted": "only the lighthouse killed, started again after 1 s",
    "steps_per_s": "steps per second without faults",
    "cpu_ms_per_step": "CPU milliseconds of all processes for such a step",
    "samples": "samples of the committed steps under faults",
    "samples_lost": "of them lost",
    "samples_doubled": "of them doubled",
    "steps": "steps committed in that run",
    "steps_with_unequal_state": "steps after which members differed",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--torchft-python", type=Path, default=Path(sys.executable), help="of an environment with torchft"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    check_torchft(options.torchft_python)
    random.seed(options.seed)
    amount = QUICK if options.quick else FULL
    print(environment_line(), flush=True)
    begin = time.monotonic()
    columns = {"ours": measure_ours(amount)}
    print(f"{time.strftime('%X')} ours: {columns['ours']}", flush=True)
    columns["torchft_short"] = measure_short(options.torchft_python, amount)
    print(f"{time.strftime('%X')} torchft, short timeouts: {columns['torchft_short']}", flush=True)
    columns["torchft_default"] = measure_default(options.torchft_python, amount)
    order = ("ours", "torchft_default", "torchft_short")
    rows = [(text, *(_cell(columns[name].get(row)) for name in order)) for row, text in ROWS.items()]
    print(table(["", "ours", "torchft, default", "torchft, short timeouts"], rows))
    last_line({**columns, "longest_wait_s": amount.longest_s, "seconds": time.monotonic() - begin})
    wrong = ("samples_lost", "samples_doubled", "steps_with_unequal_state")
    return 1 if any(columns["ours"][name] for name in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
