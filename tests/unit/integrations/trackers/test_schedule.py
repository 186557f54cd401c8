"""Schedule of writes: order, waiting, rollbacks and late values."""

from __future__ import annotations

from barnraise.history.columns import pack_column
from barnraise.history.entries import Entry, GroupStart, OwnValues, RunEnd, StepBatch, ValueBatch
from barnraise.integrations.trackers.rows import run_content
from barnraise.integrations.trackers.schedule import WriteSchedule, Written

A, B = bytes([1]) * 32, bytes([2]) * 32


def steps(generation: int, first: int, count: int) -> list[Entry]:
    ticks = (1000,) * count
    losses = pack_column([generation + step / 1000 for step in range(first, first + count)])
    return [
        StepBatch(generation, first, 100.0 + first, ticks, (8,) * count),
        ValueBatch(generation, first, ("loss",), (losses,)),
    ]


def group(generation: int, step: int, *members: bytes) -> GroupStart:
    return GroupStart(100.0 + step, generation, step, members or (A,))


class Feed:
    """Schedule, and a tracker that keeps everything in memory."""

    def __init__(self) -> None:
        self.schedule, self.written = WriteSchedule(settle_s=30), Written()
        self.rows: dict[int, float | None] = {}
        self.late: list[str] = []

    def look(self, *logs: list[Entry], at: float = 0.0) -> list[int]:
        due = self.schedule.due(run_content(logs, "r"), self.written, at)
        if due.back_to is not None:
            self.written.go_back(due.back_to)
            self.rows = {step: loss for step, loss in self.rows.items() if step < due.back_to}
        for row in due.steps:
            assert row.step not in self.rows
            self.rows[row.step] = row.values.get("loss")
            self.written.add(row.step, row.group, row.values)
        self.late.extend(due.late)
        return [row.step for row in due.steps]


def test_each_step_is_due_once() -> None:
    feed = Feed()
    log = [group(1, 0), *steps(1, 0, 5)]
    assert feed.look(log) == [0, 1, 2, 3, 4]
    assert feed.look(log) == []
    assert feed.look([*log, *steps(1, 5, 2)]) == [5, 6]


def test_step_waits_for_the_steps_before_it() -> None:
    feed = Feed()
    log, other = [group(1, 0), *steps(1, 0, 3), *steps(1, 6, 2)], steps(1, 3, 3)
    assert feed.look(log) == [0, 1, 2]
    assert feed.look(log, at=29) == []
    assert feed.look(log, other, at=29.5) == [3, 4, 5, 6, 7]


def test_missing_steps_are_skipped_in_the_end_and_named_if_they_arrive() -> None:
    feed = Feed()
    log, other = [group(1, 0), *steps(1, 0, 3), *steps(1, 6, 2)], steps(1, 3, 3)
    feed.look(log)
    assert feed.look(log, at=31) == [6, 7]
    assert feed.look(log, other, at=32) == []
    assert feed.late == [f"step {step} arrived too late" for step in (3, 4, 5)]
    feed.look(log, other, at=33)
    assert len(feed.late) == 3, "a late step is named once"


def test_newest_step_waits_for_its_values() -> None:
    feed = Feed()
    bare = StepBatch(1, 3, 103.0, (1000,), (8,))
    log = [group(1, 0), *steps(1, 0, 3)]
    assert feed.look([*log, bare]) == [0, 1, 2]
    assert feed.look([*log, bare, ValueBatch(1, 3, ("loss",), (pack_column([0.5]),))], at=1) == [3]
    assert feed.rows[3] == 0.5


def test_own_sums_wait_for_the_other_worker() -> None:
    feed = Feed()
    bare = StepBatch(1, 3, 103.0, (1000,), (8,))
    log = [group(1, 0, A, B), *steps(1, 0, 3), bare, OwnValues(1, 3, 0, ("loss",), (1.0,), (1.0,))]
    assert feed.look(log) == [0, 1, 2]
    assert feed.look(log, [OwnValues(1, 3, 1, ("loss",), (3.0,), (1.0,))], at=5) == [3]
    assert feed.rows[3] == 2.0


def test_value_that_changes_after_the_wait_is_named() -> None:
    feed = Feed()
    bare = StepBatch(1, 3, 103.0, (1000,), (8,))
    log = [group(1, 0, A, B), *steps(1, 0, 3), bare, OwnValues(1, 3, 0, ("loss",), (1.0,), (1.0,))]
    feed.look(log)
    assert feed.look(log, at=31) == [3]
    feed.look(log, [OwnValues(1, 3, 1, ("loss",), (3.0,), (1.0,))], at=40)
    assert feed.late == ["loss of step 3 arrived too late: 2"]


def test_rollback_writes_the_steps_of_the_newer_group_again() -> None:
    feed = Feed()
    log = [group(1, 0), *steps(1, 0, 10)]
    feed.look(log)
    log += [group(2, 6), *steps(2, 6, 2), RunEnd(200.0, 0)]
    assert feed.look(log, at=1) == [6, 7]
    assert sorted(feed.rows) == list(range(8))
    assert (feed.rows[6] or 0.0) > 2
    assert feed.look(log, at=2) == []


def test_note_keeps_its_key_if_the_reason_changes() -> None:
    from barnraise.history.entries import MembershipChange

    first = run_content([[MembershipChange(5.0, B, "died", "", 3, 2)]], "r").notes
    second = run_content([[MembershipChange(4.0, B, "died", "signal 9", 3, 2)]], "r").notes
    assert [note.key for note in first] == [note.key for note in second]
    assert first[0].text != second[0].text
