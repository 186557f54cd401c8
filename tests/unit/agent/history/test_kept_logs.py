"""Records on the disk are listed by age, and the oldest are removed first."""

from __future__ import annotations

import os
from pathlib import Path

from barnraise.agent.history.kept_logs import kept_logs, remove_oldest
from barnraise.history.entries import LogHead, NoteEntry
from barnraise.history.log_file import RunLogWriter, log_path
from benchmarks.invented_run import DESK, MAC


def _write(state: Path, run: str, node: bytes, changed_at: float) -> int:
    writer = RunLogWriter(log_path(state, run, node), LogHead(run, node, "agent", bytes(16), 1.0))
    writer.append([NoteEntry(float(number), "x" * 2000) for number in range(3)])
    writer.close()
    os.utime(log_path(state, run, node), (changed_at, changed_at))
    return writer.size


def test_oldest_records_are_removed_beyond_the_limit(tmp_path: Path) -> None:
    size = _write(tmp_path, "first", DESK, 100.0)
    _write(tmp_path, "second", DESK, 300.0)
    _write(tmp_path, "second", MAC, 50.0)
    _write(tmp_path, "third", DESK, 200.0)
    assert [log.run for log in kept_logs(tmp_path)] == ["second", "second", "third", "first"]
    assert remove_oldest(tmp_path, 5 * size, set()) == []
    assert remove_oldest(tmp_path, 2 * size, {"first"}) == ["third", "second"]
    assert [log.run for log in kept_logs(tmp_path)] == ["first"]
    assert remove_oldest(tmp_path, 0, {"first"}) == []


def test_directory_without_records_is_empty(tmp_path: Path) -> None:
    assert kept_logs(tmp_path) == []
