"""Growing record of two machines that goes back once, while the real command is killed at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from barnraise.history.columns import pack_column, unpack_column
from barnraise.history.entries import Entry, GroupStart, LogHead, RunEnd, StepBatch, ValueBatch
from barnraise.history.log_file import RunLogWriter, log_path
from barnraise.history.merge import merge
from barnraise.integrations.trackers.feeder import Tracker
from barnraise.integrations.trackers.rows import run_content
from barnraise.integrations.trackers.schedule import WriteSchedule
from benchmarks.invented_run import DESK, MAC, RUN, START, STEPS, example_run
from tests.unit.integrations.trackers.test_schedule import group, steps

Curves = dict[str, list[tuple[int, float]]]
BACK_TO = 450  # the step to which training goes back
_MOST_S = 120


def recorded(logs: Sequence[Sequence[Entry]]) -> Curves:
    """Return the logged values that count, step by step."""
    curves: Curves = {}
    for entry in merge(logs):
        if isinstance(entry, ValueBatch):
            for name, column in zip(entry.names, entry.columns, strict=True):
                values = enumerate(unpack_column(column))
                curves.setdefault(name, []).extend((entry.first + row, value) for row, value in values)
    return curves


def events(entries: Sequence[Entry]) -> list[str]:
    """Return the texts of the events, sorted."""
    return sorted(note.text for note in run_content([entries], RUN).notes)


def named(*names: str) -> list[Entry]:
    """Return a log of three steps with values of these names."""
    columns = tuple(pack_column([float(number)] * 3) for number in range(len(names)))
    return [group(1, 0), StepBatch(1, 0, 100.0, (1000,) * 3, (8,) * 3), ValueBatch(1, 0, names, columns)]


def give(tracker: Tracker, *logs: Sequence[Entry]) -> None:
    """Give a tracker at once what the logs hold."""
    content = run_content(logs, RUN)
    due = WriteSchedule().due(content, tracker.written, 0.0, is_settled=True)
    if due.back_to is not None:
        tracker.go_back(due.back_to)
        due = WriteSchedule().due(content, tracker.written, 0.0, is_settled=True)
    if due.steps:
        tracker.write(due.steps)
    if due.notes:
        tracker.note(due.notes)


def feed_with_kills(state: Path, target: str, longest_s: float, held: Callable[[], int]) -> list[Entry]:
    """Feed a tracker, and kill the command after each part of the record; return the whole record.

    ``held``: tells how many steps the tracker holds. Before training goes back, it is to hold steps that will
    not count. ``longest_s``: the latest moment of the other kills. Every second one is counted from the first
    sentence of the command, so that some kills hit the start and some the writing.
    """
    writers = {
        node: RunLogWriter(log_path(state, RUN, node), LogHead(RUN, node, "agent", bytes(16), 1.0))
        for node in (DESK, MAC)
    }
    entries = [entry for entry in example_run(STEPS, rows=3) if not isinstance(entry, LogHead | RunEnd)]
    numbers = [entry for entry in entries if isinstance(entry, StepBatch | ValueBatch)]
    events = [entry for entry in entries if not isinstance(entry, StepBatch | ValueBatch)]
    noise = random.Random(3)
    for start in range(0, len(numbers), 80):
        # The main worker moves: from the middle on, the other machine writes.
        writers[DESK].append(events if start == 0 else [])
        writers[DESK if start < len(numbers) // 2 else MAC].append(numbers[start : start + 80])
        _kill(state, target, noise.uniform(0, longest_s), is_begun=start % 160 == 0)
    _kill(state, target, 0, is_begun=True, until=lambda: held() > BACK_TO + 10)
    back = [GroupStart(START + 9000, 9, BACK_TO, (MAC,), "checkpoint"), *steps(9, BACK_TO, 90)]
    writers[MAC].append(back)
    for is_begun in (True, False, True):
        _kill(state, target, noise.uniform(0, longest_s), is_begun=is_begun)
    end = [*steps(9, BACK_TO + 90, 30), RunEnd(START + 9900, 0)]
    writers[MAC].append(end)
    subprocess.run(_command(target), env=_environment(state), check=True, timeout=_MOST_S)
    return [*entries, *back, *end]


def _kill(
    state: Path, target: str, after_s: float, *, is_begun: bool, until: Callable[[], bool] = lambda: True
) -> None:
    """Start the command and kill it after some seconds, counted from its first sentence or its start."""
    feeder = subprocess.Popen(
        _command(target), env=_environment(state), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert feeder.stdout is not None
    begin = feeder.stdout.readline() if is_begun else b""
    time.sleep(after_s)
    deadline = time.monotonic() + _MOST_S
    while not until():
        assert time.monotonic() < deadline, "the tracker does not get the steps"
        assert feeder.poll() is None, feeder.communicate()[0].decode()
        time.sleep(0.2)
    feeder.kill()
    output = begin + feeder.communicate(timeout=_MOST_S)[0]
    assert feeder.returncode == -9, output.decode()


def rows(database: Path, query: str) -> int:
    """Return the number that a query gives; 0 if there is no such table yet."""
    if not database.exists():
        return 0
    with contextlib.closing(sqlite3.connect(database, timeout=30)) as connection:
        try:
            return int(connection.execute(query).fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def _command(target: str) -> list[str]:
    command = [sys.executable, "-u", "-c", "from barnraise.cli.main import main; main()"]
    return [*command, "track", RUN, "--to", target]


def _environment(state: Path) -> dict[str, str]:
    return {**os.environ, "BARNRAISE_STATE_DIRECTORY": str(state)}
