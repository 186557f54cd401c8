"""Rows with gaps of all kinds become coarser, and no step is lost or doubled by it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import pytest

from barnraise.history.columns import pack_column, unpack_column
from barnraise.history.curves import build_curves
from barnraise.history.entries import Entry, GroupStart, MembershipChange, OwnValues, StepBatch, ValueBatch
from barnraise.history.log_format import decode_frames, encode_frames
from barnraise.history.logs.compaction import MOST_PARTS, compact
from barnraise.history.logs.spans import intervals, spans_of, steps_per_row, united
from barnraise.history.merge import merge
from barnraise.history.step_rows import ValueRow, value_batches
from barnraise.history.step_table import StepTable
from benchmarks.invented_run import DESK, MAC

Log = list[Entry]
_ROOM = 6000


def _step(generation: int, first: int, stride: int = 1) -> StepBatch:
    return StepBatch(generation, first, float(first), (10 * stride,), (8 * stride,), ((stride,),) * 6, stride)


def _value(generation: int, first: int, stride: int = 1, *, loss: float = 1.0) -> ValueBatch:
    return _values(generation, first, {"loss": loss}, stride)


def _values(generation: int, first: int, values: Mapping[str, float], stride: int = 1) -> ValueBatch:
    columns = tuple(pack_column([value]) for value in values.values())
    return ValueBatch(generation, first, tuple(values), columns, stride)


def _every_tenth(rng: random.Random) -> Iterator[Entry]:
    """Yield what a script writes that logs each tenth step."""
    for first in range(0, 4000, 100):
        yield StepBatch(1, first, float(first), (10,) * 100, (8,) * 100)
    yield from (_value(1, step, loss=float(step % 7)) for step in range(0, 4000, 10))


def _hub(rng: random.Random) -> Iterator[Entry]:
    """Yield steps of leases: as many as all groups have trained meanwhile."""
    step = 0
    for _ in range(400):
        stride = rng.randint(1, 9)
        yield _step(1, step, stride)
        yield _value(1, step, stride, loss=float(step % 7))
        step += stride


def _absences(rng: random.Random) -> Iterator[Entry]:
    """Yield the steps of a machine that is often away; each return is another group."""
    step = 0
    for generation in range(1, 300):
        step += rng.randint(0, 20)
        yield GroupStart(float(step), generation, step, (DESK, MAC))
        for _ in range(rng.randint(1, 5)):
            yield _step(generation, step)
            yield _value(generation, step, loss=float(step % 7))
            step += 1


def _unlike_names(rng: random.Random) -> Iterator[Entry]:
    """Yield the steps of a script that logs another value with each tenth."""
    for step in range(1000):
        yield _step(1, step)
        other = {"lr": 0.5} if step % 10 == 0 else {}
        yield _values(1, step, {"loss": float(step % 7), **other})


def _some_steps(rng: random.Random) -> Iterator[Entry]:
    """Yield steps at random places, of which some were trained without a quorum."""
    for step in sorted(rng.sample(range(20_000), 600)):
        alone = bool(rng.random() < 0.2)
        yield StepBatch(1, step, 1.0, (10,), (8,), is_provisional=alone)
        columns = (pack_column([float(step % 7)]),)
        yield ValueBatch(1, step, ("loss",), columns, is_provisional=alone)


def _rolled_back(rng: random.Random) -> Iterator[Entry]:
    """Yield groups of which each began at a checkpoint, before the last step of the group before."""
    step = 0
    for generation in range(1, 120):
        yield GroupStart(float(generation), generation, step, (DESK,), "checkpoint")
        for _ in range(10):
            yield _step(generation, step)
            yield _value(generation, step, loss=float(step % 7))
            step += 1
        step -= rng.randint(0, 5)


SHAPES = [_every_tenth, _hub, _absences, _unlike_names, _some_steps, _rolled_back]


def _steps(entries: Iterable[Entry], kind: type[StepBatch] | type[ValueBatch] = StepBatch) -> Counter[int]:
    return Counter(
        step
        for entry in entries
        if isinstance(entry, kind)
        for first, end in intervals(entry)
        for step in range(first, end)
    )


def _samples(entries: Iterable[Entry]) -> int:
    return sum(sum(entry.samples) for entry in entries if isinstance(entry, StepBatch))


def _sum_of_losses(entries: Iterable[Entry]) -> float:
    return sum(
        sum(unpack_column(entry.columns[entry.names.index("loss")])) * steps_per_row(entry)
        for entry in entries
        if isinstance(entry, ValueBatch)
    )


def _size(entries: Sequence[Entry]) -> int:
    return len(encode_frames(entries))


@pytest.mark.parametrize("make", SHAPES)
def test_all_rows_become_coarser_and_keep_their_steps(
    make: Callable[[random.Random], Iterator[Entry]],
) -> None:
    log = list(make(random.Random(1)))
    whole, small = merge([log]), compact(log, _ROOM)
    assert _size(small) <= _ROOM < _size(whole) / 2
    assert decode_frames(encode_frames(small)).entries == small, "another machine could not read it"
    merged = merge([small])
    assert _steps(merged) == _steps(whole)
    assert _steps(merged, ValueBatch) == _steps(whole, ValueBatch)
    assert _samples(merged) == _samples(whole)
    assert _sum_of_losses(merged) == pytest.approx(_sum_of_losses(whole), rel=1e-3)
    assert merge([merged]) == merged


@pytest.mark.parametrize("make", SHAPES)
def test_fine_log_of_another_machine_replaces_the_coarse_one(
    make: Callable[[random.Random], Iterator[Entry]],
) -> None:
    log = list(make(random.Random(2)))
    whole, merged = merge([log]), merge([log, compact(log, _ROOM)])
    assert _steps(merged) == _steps(whole)
    assert _steps(merged, ValueBatch) == _steps(whole, ValueBatch)
    assert _samples(merged) == _samples(whole)
    assert _sum_of_losses(merged) == pytest.approx(_sum_of_losses(whole))


def test_coarse_log_fills_what_another_machine_lacks() -> None:
    desk: Log = []
    mac: Log = []
    for step in range(400):  # each was there for other steps
        (desk if step // 20 % 2 else mac).extend([_step(1, step), _value(1, step, loss=1.0)])
    merged = merge([compact(desk, 1500), compact(mac, 1500)])
    assert _steps(merged) == Counter(range(400))
    assert _samples(merged) == 8 * 400


def test_steps_without_values_make_rare_values_follow_each_other() -> None:
    log: Log = []
    for first in range(0, 40_000, 100):
        log.append(StepBatch(1, first, float(first), (10,) * 100, (8,) * 100))
        rows = [
            ValueRow(1, step, 1, {"loss": float(step)} if step % 10 == 0 else {})
            for step in range(first, first + 100)
        ]
        log.extend(value_batches(rows))
    small = compact(log, 12_000)
    coarse = [batch for batch in small if isinstance(batch, ValueBatch)]
    assert len(coarse) < 250
    assert not any(batch.spans for batch in coarse)
    curve = build_curves(coarse)[0]
    assert curve.points[-1].high == 39_990.0
    merged = merge([small, log])
    assert _sum_of_losses(
        [row for row in merged if isinstance(row, ValueBatch) and row.columns]
    ) == pytest.approx(sum(range(0, 40_000, 10)))


def test_log_that_becomes_coarser_again_and_again_loses_nothing() -> None:
    rng = random.Random(3)
    log: Log = []
    original: Log = []
    step = 0
    for _ in range(60):
        for _ in range(40):
            step += rng.choice([1, 1, 1, 2, 30])
            new: Log = [_step(1, step), _value(1, step, loss=2.0)]
            original += new
            log += new
        log = list(compact(log, _ROOM))
        assert _size(log) <= _ROOM
    assert _steps(merge([log])) == _steps(merge([original]))
    assert _sum_of_losses(merge([log])) == pytest.approx(_sum_of_losses(original))


def test_dropped_steps_stay_counted() -> None:
    log = list(_rolled_back(random.Random(4)))

    def dropped(entries: Iterable[Entry]) -> int:
        return sum(entry.dropped for entry in entries if isinstance(entry, GroupStart))

    assert dropped(merge([compact(log, 12_000)])) == dropped(merge([log])) > 0


def test_own_values_of_steps_with_known_means_leave_first() -> None:
    log: Log = [GroupStart(0.0, 1, 0, (DESK,))]
    for step in range(500):  # each is a checkpoint, before which all workers write their own values
        log += [_step(1, step), _value(1, step, loss=1.0)]
        log += [OwnValues(1, step, rank, ("loss",), (1.0,), (1.0,)) for rank in range(4)]
    log.append(OwnValues(1, 500, 0, ("loss",), (3.0,), (1.0,)))
    small = compact(log, 20_000)
    assert [entry.step for entry in small if isinstance(entry, OwnValues)] == [500]
    assert sum(isinstance(entry, ValueBatch) and entry.stride > 1 for entry in small) <= 1, "there was room"


def test_events_leave_half_of_the_room_to_steps() -> None:
    log: Log = [MembershipChange(float(number), DESK, "left", "x" * 100, number) for number in range(200)]
    log += [_step(1, step) for step in range(300)]
    small = compact(log, 10_000)
    changes = [entry for entry in small if isinstance(entry, MembershipChange)]
    assert 10 <= len(changes) <= 50
    assert changes[-1] == log[199]
    assert _steps(small) == Counter(range(300))


def test_groups_that_began_without_a_gap_are_forgotten_in_the_end() -> None:
    log: Log = []
    for generation in range(2000):
        log += [
            GroupStart(float(generation), generation, generation, (DESK, MAC)),
            _step(generation, generation),
        ]
    small = compact(log, 20_000)
    assert _size(small) <= 20_000
    assert _steps(merge([small])) == Counter(range(2000))
    assert max(entry.generation for entry in small if isinstance(entry, GroupStart)) == 1999


def test_row_of_several_generations_never_replaces_that_of_one() -> None:
    # This machine was away while the others went back to step 3.
    own: Log = [_step(1, 0, 5), _step(3, 5, 5)]
    mixed = compact([*own, *own, *(_step(4 + n, 10 + n) for n in range(300))], 500)
    assert any(isinstance(entry, StepBatch) and entry.oldest == 1 for entry in mixed)
    others: Log = [GroupStart(1.0, 2, 3, (MAC,), "checkpoint"), StepBatch(2, 3, 1.0, (7, 7), (99, 99))]
    merged = merge([mixed, others])
    assert [entry.samples for entry in merged if isinstance(entry, StepBatch) and entry.generation == 2] == [
        (99, 99)
    ]
    assert max(_steps(merged).values()) == 1


def test_columns_of_unequal_length_become_coarser_too() -> None:
    log: Log = [StepBatch(1, 7 * part, 1.0, (10,) * 7, (8,) * 5, ((1,) * 3,) * 6) for part in range(200)]
    log += [ValueBatch(1, 7 * part, ("a", "b"), (bytes(28), bytes(9))) for part in range(200)]
    log += [ValueBatch(1, 2000 + part, ("a", "b", "c"), (bytes(4),), lows=(bytes(8),)) for part in range(99)]
    assert _steps(merge([compact(log, 3000)])) == Counter(range(1400))


def test_gaps_of_a_log_are_limited_before_they_take_too_long() -> None:
    rng = random.Random(6)
    log: Log = [_step(1, step) for step in rng.sample(range(10_000_000), 20_000)]
    small = compact(log, 200_000)
    assert sum(len(entry.spans) // 2 for entry in small if isinstance(entry, StepBatch)) <= MOST_PARTS
    assert _size(small) <= 200_000
    assert _samples(small) == 8 * 20_000


def test_names_beyond_the_limit_are_the_newest_ones() -> None:
    log: Log = [_values(1, step, {f"value{step}": 1.0}) for step in range(2000)]
    small = compact(log, 60_000)
    assert _size(small) <= 60_000
    assert decode_frames(encode_frames(small)).entries == small
    assert any("value1999" in entry.names for entry in small if isinstance(entry, ValueBatch))


def test_view_counts_only_the_steps_that_a_row_has() -> None:
    log: Log = [_step(1, step) for step in range(0, 2000, 10)]
    table, coarse = StepTable(), StepTable()
    table.update([batch for batch in merge([log]) if isinstance(batch, StepBatch)])
    coarse.update([batch for batch in merge([compact(log, 2000)]) if isinstance(batch, StepBatch)])
    assert (coarse.missing, coarse.samples, coarse.end) == (table.missing, table.samples, table.end)
    pace, coarse_pace = table.pace(0, None), coarse.pace(0, None)
    assert pace is not None
    assert coarse_pace is not None
    assert coarse_pace[1:] == pytest.approx(pace[1:])


def test_too_many_parts_become_one_where_they_are_nearest() -> None:
    rng = random.Random(5)
    parts = united((first, first + 1) for first in rng.sample(range(100_000), 5000))
    spans = spans_of(parts)
    assert len(spans) <= 4095
    assert sum(spans) == parts[-1][1] - parts[0][0]
    row = StepBatch(1, parts[0][0], 1.0, (1,), (1,), stride=sum(spans), spans=spans)
    assert {step for first, _ in parts for step in [first]} <= set(_steps([row]))


def test_spans_that_do_not_fit_their_row_count_for_nothing() -> None:
    for spans in [(1,), (1, 2), (1, 2, 3), (4, 4, 4)]:
        assert intervals(StepBatch(1, 5, 1.0, (1,), (1,), stride=9, spans=spans)) == [(5, 14)]
    assert intervals(StepBatch(1, 5, 1.0, (1, 1), (1, 1), stride=3, spans=(1, 1, 1))) == [(5, 11)]
