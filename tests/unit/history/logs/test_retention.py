"""Records that changed last stay on a disk, and removed ones are remembered."""

from __future__ import annotations

import pytest

from barnraise.agent_client.history.requests import KeptLog
from barnraise.history.logs.retention import (
    MOST_REMOVALS,
    RemovedRecord,
    is_removed,
    newest_removals,
    removal,
    removals_digest,
    runs_beyond,
)
from benchmarks.invented_run import DESK, MAC


def _log(run: str, size: int, changed_at: float, node: bytes = DESK) -> KeptLog:
    return KeptLog(run, node, 1000 * size, changed_at)


@pytest.mark.parametrize(
    ("most_bytes", "active", "beyond"),
    [
        (100, (), []),
        (99, (), ["old"]),
        (60, (), ["old", "middle"]),
        (70, ("old",), ["middle"]),
        (0, ("new",), ["old", "middle"]),
    ],
)
def test_records_without_a_change_for_longest_are_too_much(
    most_bytes: int, active: tuple[str, ...], beyond: list[str]
) -> None:
    logs = [
        _log("new", 50, 30.0),
        _log("old", 20, 10.0),
        _log("middle", 20, 5.0),
        _log("middle", 10, 20.0, MAC),
    ]
    assert runs_beyond(logs, 1000 * most_bytes, active) == beyond


def test_log_that_is_here_and_offered_counts_once() -> None:
    here, offered = _log("a", 50, 10.0), _log("a", 60, 40.0)
    assert runs_beyond([here, offered, _log("b", 40, 20.0)], 100_000, ()) == []
    assert runs_beyond([here, offered, _log("b", 40, 20.0)], 99_000, ()) == ["b"]


def test_small_logs_count_as_large_as_they_are_on_a_disk() -> None:
    logs = [KeptLog(f"run-{number}", DESK, 100, float(number)) for number in range(100)]
    assert len(runs_beyond(logs, 40_960, ())) == 90


def test_removal_covers_logs_of_machines_with_another_clock() -> None:
    removed = removal("a", 1000.0, [5.0, 90_000.0])  # a clock that was ahead wrote one of the logs
    times = {removed.run: removed.at}
    assert is_removed("a", 90_001.0, times)
    assert not is_removed("b", 1.0, times)
    assert not is_removed("a", removed.at + 1, times), "a later run of the same name"


def test_newest_removals_are_the_same_in_any_order() -> None:
    many = [RemovedRecord(float(number % 7), f"run-{number}") for number in range(2 * MOST_REMOVALS)]
    newest = newest_removals(many)
    assert len(newest) == MOST_REMOVALS
    assert newest_removals([*reversed(many), *newest]) == newest
    assert newest_removals([*newest[:100], *many]) == newest
    assert removals_digest(newest) == removals_digest(newest_removals(reversed(many)))
    assert removals_digest(newest) != removals_digest(newest[1:])


def test_run_that_was_removed_twice_has_its_later_removal() -> None:
    assert newest_removals([RemovedRecord(9.0, "a"), RemovedRecord(4.0, "a")]) == (RemovedRecord(9.0, "a"),)
