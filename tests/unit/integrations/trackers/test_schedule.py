"""Schedule of writes: order, waiting, rollbacks and late values."""

from __future__ import annotations

import random

import msgspec
import pytest

from barnraise.history.columns import pack_column
from barnraise.history.entries import Entry, GroupStart, OwnValues, RunEnd, StepBatch, ValueBatch
from barnraise.history.logs.compaction import compact
from barnraise.integrations.trackers.rows import StepValues, run_content
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
        self.points: list[StepValues] = []
        self.late: list[str] = []

    def look(self, *logs: list[Entry], at: float = 0.0) -> list[int]:
        due = self.schedule.due(run_content(logs, "r"), self.written, at)
        if due.back_to is not None:
            self.written.go_back(due.back_to)
            self.rows = {step: loss for step, loss in self.rows.items() if step < due.back_to}
            self.points = [row for row in self.points if row.step < due.back_to]
        for row in due.steps:
            assert row.step not in self.rows
            self.rows[row.step] = row.values.get("loss")
            self.points.append(row)
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


def value_rows(first: int, count: int, stride: int, *, low: float = 0.0, high: float = 0.0) -> ValueBatch:
    means = [step + (stride - 1) / 2 for step in range(first, first + count * stride, stride)]
    lows = pack_column([mean - low for mean in means])
    highs = pack_column([mean + high for mean in means])
    return ValueBatch(1, first, ("loss",), (pack_column(means),), stride, (lows,), (highs,))


def step_rows(first: int, count: int, stride: int) -> StepBatch:
    return StepBatch(1, first, 100.0 + first, (1000 * stride,) * count, (8 * stride,) * count, stride=stride)


@pytest.mark.parametrize(("step_stride", "value_stride"), [(2, 1), (1, 4), (4, 1), (4, 2), (3, 2), (8, 8)])
def test_all_values_of_coarse_rows_are_written_once(step_stride: int, value_stride: int) -> None:
    feed = Feed()
    log: list[Entry] = [group(1, 0), step_rows(0, 24 // step_stride, step_stride), *steps(1, 24, 1)]
    log.append(value_rows(0, 24 // value_stride, value_stride))
    feed.look(log, at=0)
    points = [row for row in feed.points if row.step < 24]
    steps_of_points = [step for row in points for step in range(row.first, row.step + 1)]
    assert steps_of_points == list(range(24))
    weights = [sum(logged.steps for logged in row.logged) for row in points]
    total = sum(row.values.get("loss", 0.0) * weight for row, weight in zip(points, weights, strict=True))
    assert total == pytest.approx(sum(range(24)))
    assert sum(weights) == 24


def test_tracker_is_told_the_steps_and_extremes_of_a_coarse_row() -> None:
    feed = Feed()
    log: list[Entry] = [group(1, 0), step_rows(0, 2, 4), value_rows(0, 2, 4, low=1.0, high=7.0)]
    feed.look([*log, *steps(1, 8, 4)])
    first, second, fine = feed.points[0].values, feed.points[1].values, feed.points[2].values
    assert (first["loss"], first["run/lowest/loss"], first["run/highest/loss"]) == (1.5, 0.5, 8.5)
    assert (second["run/first_step"], second["run/steps"], second["run/step_s"]) == (4.0, 4.0, 0.1)
    assert not {"run/first_step", "run/steps", "run/lowest/loss"} & fine.keys()


def test_row_that_a_tracker_has_in_part_is_written_from_there_on() -> None:
    feed = Feed()
    log: list[Entry] = [group(1, 0), *steps(1, 0, 6)]
    assert feed.look(log) == [0, 1, 2, 3, 4, 5]
    later: list[Entry] = [group(1, 0), step_rows(0, 2, 4), value_rows(0, 4, 2), *steps(1, 8, 2)]
    assert feed.look(later, at=5) == [7, 8, 9]
    rest = feed.points[6]
    assert (rest.first, rest.values["run/first_step"], rest.values["run/steps"]) == (6, 6.0, 2.0)
    assert rest.values["loss"] == 6.5, "the mean of 6 and 7 only"
    assert feed.late == []


def test_row_that_lacks_steps_does_not_hide_those_of_another_machine() -> None:
    feed = Feed()
    desk: list[Entry] = [
        group(1, 0),
        StepBatch(1, 0, 109.0, (8000,), (64,), stride=10, spans=(4, 2, 4)),
        ValueBatch(1, 0, ("loss",), (pack_column([1.0]),), 10, spans=(4, 2, 4)),
        *steps(1, 10, 3),
    ]
    mac = steps(1, 4, 2)
    assert feed.look(desk, mac) == [4, 5, 9, 10, 11, 12]
    assert feed.points[2].values["run/steps"] == 8.0
    assert feed.look(desk, mac, at=40) == []


def test_values_without_their_steps_are_written_in_the_end() -> None:
    feed = Feed()
    log: list[Entry] = [group(1, 0), *steps(1, 0, 3), value_rows(3, 1, 2), *steps(1, 5, 2)]
    assert feed.look(log) == [0, 1, 2]
    assert feed.look(log, at=31) == [4, 5, 6]
    assert feed.rows[4] == 3.5


def test_row_of_several_groups_is_no_rollback() -> None:
    feed = Feed()
    log: list[Entry] = [group(1, 0), *steps(1, 0, 4), group(2, 4), *steps(2, 4, 4)]
    feed.look(log)
    mixed = msgspec.structs.replace(step_rows(0, 2, 4), generation=2, oldest=1)
    assert feed.look([group(1, 0), group(2, 4), mixed, value_rows(0, 2, 4), *steps(2, 8, 2)], at=1) == [8, 9]
    assert len(feed.points) == 10


@pytest.mark.parametrize("seed", range(8))
def test_record_that_becomes_coarser_meanwhile_reaches_the_tracker_once(seed: int) -> None:
    rng = random.Random(seed)
    feed, log, step = Feed(), [group(1, 0)], 0
    compacted: tuple[Entry, ...] = tuple(log)
    for poll in range(40):
        count = rng.randint(1, 60)
        compacted = (*compacted, *steps(1, step, count))
        step += count
        if rng.random() < 0.6:
            compacted = compact(compacted, 2500)
        if rng.random() < 0.5:
            feed.look(list(compacted), at=float(poll))
    feed.look(list(compacted), at=100.0)
    assert [n for row in feed.points for n in range(row.first, row.step + 1)] == list(range(step))
    assert feed.late == []
