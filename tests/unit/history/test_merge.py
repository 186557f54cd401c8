"""Several logs of a run become one history in which each committed step appears exactly once."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from barnraise.history.columns import pack_column, unpack_column
from barnraise.history.entries import Entry, GroupStart, OwnValues, StepBatch, ValueBatch
from barnraise.history.log_format import decode_frames, encode_frames
from barnraise.history.merge import Coverage, merge
from benchmarks.invented_run import DESK, MAC, NAS, STEPS, example_run, step_entries


def _rows(
    generation: int, first: int, count: int, *, loss: float = 1.0, provisional: bool = False
) -> list[Entry]:
    return [
        StepBatch(generation, first, float(first), (10,) * count, (4,) * count, is_provisional=provisional),
        ValueBatch(generation, first, ("loss",), (pack_column([loss] * count),), is_provisional=provisional),
    ]


def _start(generation: int, step: int, members: tuple[bytes, ...] = (DESK,)) -> GroupStart:
    return GroupStart(float(step), generation, step, members)


def _steps(entries: Sequence[Entry]) -> list[int]:
    return [step for e in entries if isinstance(e, StepBatch) for step in range(e.first, e.end)]


def _losses(entries: Sequence[Entry]) -> dict[int, float]:
    return {
        e.first + row: value
        for e in entries
        if isinstance(e, ValueBatch)
        for row, value in enumerate(unpack_column(e.columns[0]))
    }


@pytest.mark.parametrize("seed", range(20))
def test_merge_of_logs_with_dead_writers_has_each_step_once(seed: int) -> None:
    rng = random.Random(seed)
    entries = example_run(rows=3)
    logs: list[list[Entry]] = [[], [], []]
    for entry in entries:
        holders = rng.sample(range(3), rng.randint(1, 3))  # a dead writer lacks entries; another has them
        for holder in holders:
            logs[holder].append(entry)
    merged = merge(decode_frames(encode_frames(log)).entries for log in logs)
    assert _steps(merged) == list(range(STEPS))
    assert sorted(_losses(merged)) == list(range(STEPS))
    assert merge([merged]) == merged
    assert set(merge([merged, *logs])) == set(merged)


def test_batches_that_overlap_are_cut() -> None:
    merged = merge([_rows(1, 0, 7), _rows(1, 3, 9), _rows(1, 11, 4)])
    assert _steps(merged) == list(range(15))


def test_steps_after_a_rollback_replace_the_earlier_ones() -> None:
    first = [_start(1, 0), *_rows(1, 0, 50, loss=5.0)]
    second = [GroupStart(100.0, 2, 30, (DESK,), "checkpoint"), *_rows(2, 30, 10, loss=1.0)]
    merged = merge([first, second])
    assert _steps(merged) == list(range(40))
    assert [_losses(merged)[step] for step in (29, 30, 39)] == [5.0, 1.0, 1.0]
    assert [entry.dropped for entry in merged if isinstance(entry, GroupStart)] == [0, 20]
    assert merge([merged]) == merged


def test_dropped_steps_are_counted_at_the_group_that_went_back() -> None:
    # Workers died one after another: groups 2 and 3 went on without a gap, and 4 began at a checkpoint.
    log = [
        *(_start(1, 0), *_rows(1, 0, 5)),
        *(_start(2, 5), *_rows(2, 5, 4)),
        *(_start(3, 9), *_rows(3, 9, 3)),
        *(GroupStart(50.0, 4, 7, (DESK,), "checkpoint"), *_rows(4, 7, 3)),
        *(GroupStart(60.0, 5, 2, (DESK,), "checkpoint"), *_rows(5, 2, 8)),
    ]
    merged = merge([log, log[:4]])
    assert _steps(merged) == list(range(10))
    dropped = {entry.generation: entry.dropped for entry in merged if isinstance(entry, GroupStart)}
    assert dropped == {1: 0, 2: 0, 3: 0, 4: 5, 5: 8}
    assert merge([merged]) == merged


def test_provisional_steps_only_fill_gaps() -> None:
    alone = [
        GroupStart(10.0, 2, 10, (NAS,), "kept", is_provisional=True),
        *_rows(2, 10, 30, loss=9.0, provisional=True),
    ]
    others = [_start(1, 0), *_rows(1, 0, 10), _start(2, 10, (DESK, MAC)), *_rows(2, 10, 5)]
    assert _steps(merge([alone, _rows(1, 0, 10)])) == list(range(40))
    merged = merge([alone, others, [_start(3, 15, (DESK, MAC, NAS)), *_rows(3, 15, 5)]])
    assert _steps(merged) == list(range(20))
    assert _losses(merged)[12] == 1.0


def test_values_of_the_last_step_are_added_from_all_workers() -> None:
    own = [
        OwnValues(1, 9, rank, ("loss",), (total,), (weight,))
        for rank, total, weight in ((0, 6.0, 3.0), (1, 2.0, 1.0))
    ]
    log = [_start(1, 0), _rows(1, 0, 10)[0], _rows(1, 0, 9)[1]]
    merged = merge([[*log, own[0]], [*log, own[1]], [own[1]]])
    assert _losses(merged)[9] == pytest.approx(2.0)
    assert not any(isinstance(entry, OwnValues) for entry in merged)


def test_values_that_a_later_group_learned_belong_to_their_step() -> None:
    # The means of step 9 come with the first commit of the next group.
    log = [_start(1, 0), _rows(1, 0, 10)[0], _rows(1, 0, 9)[1], _start(2, 10), *_rows(2, 10, 3)]
    late = ValueBatch(2, 9, ("loss",), (pack_column([4.0]),))
    assert _losses(merge([[*log, late]]))[9] == 4.0


def test_coarse_rows_are_divided_where_finer_ones_exist() -> None:
    coarse = StepBatch(1, 0, 0.0, (80, 80, 80), (8, 8, 8), stride=8)
    fine = StepBatch(1, 4, 0.0, (7,) * 10, (1,) * 10)
    merged = [entry for entry in merge([[coarse], [fine]]) if isinstance(entry, StepBatch)]
    assert _steps(merged) == list(range(24))
    assert sum(map(sum, (entry.ticks for entry in merged))) == 40 + 70 + 20 + 80


def test_first_row_of_a_joining_worker_does_not_count_with_its_waiting_time() -> None:
    joined = StepBatch(2, 10, 60.0, (500_000, 10), (4, 4))
    others = StepBatch(2, 10, 60.0, (12, 10), (4, 4))
    start = _start(2, 10, (DESK, MAC))
    for logs in ([start, joined], [others]), ([start, others], [joined]):
        (batch,) = [entry for entry in merge(logs) if isinstance(entry, StepBatch)]
        assert batch.ticks == (12, 10)


def test_coverage_agrees_with_a_set() -> None:
    rng = random.Random(1)
    coverage, known = Coverage(), set[int]()
    for _ in range(300):
        first = rng.randrange(100)
        end = first + rng.randrange(12)
        gaps = {step for low, high in coverage.gaps(first, end) for step in range(low, high)}
        assert gaps == set(range(first, end)) - known
        coverage.add(first, end)
        known |= set(range(first, end))


def test_example_has_losses_that_are_finite() -> None:
    assert all(map(math.isfinite, _losses(merge([step_entries()])).values()))
