"""Cuts, dependencies and lookup tables; and that the simulator really catches broken programs."""

from __future__ import annotations

import operator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.collectives.algorithms.compile import compile_schedule
from barnraise.collectives.algorithms.schedule import (
    BufferLayout,
    ReceiveStep,
    Schedule,
    ScheduleBuilder,
    SendStep,
    block_bounds,
    chunk_bounds,
    indexed,
    segments,
)
from tests.unit.collectives.schedule_simulator import Simulation, prove_free_of_races


def test_chunk_bounds_spread_remainder_over_first_chunks() -> None:
    assert chunk_bounds(4 * 11, 4, 4) == (0, 12, 24, 36, 44)
    assert chunk_bounds(4 * 2, 4, 4) == (0, 4, 8, 8, 8)
    assert chunk_bounds(0, 3, 4) == (0, 0, 0, 0)
    assert block_bounds((3, 0, 5)) == (0, 3, 3, 8)


@given(st.integers(0, 5000), st.integers(1, 70), st.sampled_from([1, 2, 4, 8, 16]))
def test_chunk_bounds_cover_all_bytes_in_whole_items(items: int, parts: int, item: int) -> None:
    bounds = chunk_bounds(items * item, parts, item)
    sizes = [high - low for low, high in pairwise(bounds)]
    assert bounds[0] == 0
    assert bounds[-1] == items * item
    assert all(size % item == 0 for size in sizes)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= item


@given(
    start=st.integers(0, 1000),
    items=st.integers(0, 20000),
    item=st.sampled_from([1, 2, 4, 8, 16]),
    segment=st.integers(16, 4096),
)
def test_segments_cover_all_bytes_within_limit(start: int, items: int, item: int, segment: int) -> None:
    lo, hi = start * item, (start + items) * item
    pieces = segments(lo, hi, item, segment)
    assert [cell for part in pieces for cell in range(*part)] == list(range(lo, hi))
    assert all(0 < stop - begin <= segment and (begin - lo) % item == 0 for begin, stop in pieces)
    moved = [(begin - lo, stop - lo) for begin, stop in pieces]
    assert moved == list(segments(0, hi - lo, item, segment)), (
        "both ends must cut alike at any offset of the bytes"
    )
    if segment >= 64:
        assert all((begin - lo) % 64 == 0 for begin, _ in pieces)
        assert len(pieces) <= -(-(hi - lo) // (segment // 64 * 64))


def test_segments_are_near_equal() -> None:
    assert segments(0, 1 << 20, 4, 1 << 18) == tuple((n << 18, (n + 1) << 18) for n in range(4))
    sizes = [stop - begin for begin, stop in segments(0, (1 << 18) + 4, 4, 1 << 18)]
    assert sizes == [131136, 131012]


def test_builder_sends_wait_for_last_writers() -> None:
    builder = ScheduleBuilder(item=1, segment=8)
    builder.reduce(1, 0, 16)
    builder.place(2, 4, 6)
    builder.send(3, 0, 16)
    builder.send(3, 6, 8)
    schedule = builder.build()
    assert schedule.receives == (
        ReceiveStep(1, 0, 8, True),
        ReceiveStep(1, 8, 16, True),
        ReceiveStep(2, 4, 6),
    )
    assert schedule.sends == (SendStep(3, 0, 8, (0, 2)), SendStep(3, 8, 16, (1,)), SendStep(3, 6, 8, (0,)))


def test_builder_orders_reducing_receives() -> None:
    builder = ScheduleBuilder(item=1, segment=8)
    builder.reduce(1, 0, 8)
    builder.reduce(2, 0, 4)
    builder.reduce(3, 0, 8)
    assert [receive.after for receive in builder.build().receives] == [(), (0,), (0, 1)]


def test_empty_ranges_send_no_messages() -> None:
    builder = ScheduleBuilder()
    builder.send(1, 5, 5)
    builder.place(1, 5, 5)
    builder.reduce(1, 5, 5)
    assert builder.build().empty


def test_indexed_schedule_has_lookup_tables() -> None:
    schedule = Schedule(
        sends=(SendStep(1, 0, 4), SendStep(2, 0, 4, (0, 1)), SendStep(1, 4, 8, (1,))),
        receives=(
            ReceiveStep(2, 0, 4, True, (), (0,)),
            ReceiveStep(1, 0, 4, True, (0,)),
            ReceiveStep(2, 4, 8),
        ),
    )
    tables = indexed(schedule)
    assert tables is indexed(schedule)
    assert tables.steps is schedule
    assert tables.peers == {1, 2}
    assert tables.receives_from == {2: (0, 2), 1: (1,)}
    assert tables.send_ordinals == (0, 0, 1)
    assert tables.ready_sends == (0,)
    assert tables.send_waits == (0, 2, 1)
    assert tables.receive_waits == (1, 1, 0)
    assert tables.send_unlocks == ((1,), (1, 2), ())
    assert tables.receive_unlocks == ((1,), (), ())
    assert tables.read_unlocks == ((0,), (), ())


def schedules(name: str, world: int) -> list[Schedule]:
    layout = BufferLayout((48,), 2, segment=12)
    return [compile_schedule("all_reduce", name, rank, world, layout) for rank in range(world)]


def without_waiting(schedule: Schedule, field: str) -> Schedule:
    """Return the same messages without the dependencies of ``field``."""
    if field == "sends":
        return replace(schedule, sends=tuple(replace(send, after=()) for send in schedule.sends))
    if field == "after":
        return replace(schedule, receives=tuple(replace(receive, after=()) for receive in schedule.receives))
    return replace(
        schedule, receives=tuple(replace(receive, after_sends=()) for receive in schedule.receives)
    )


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("exchange", "after_sends"),
        ("star", "after"),
        ("tree", "after"),
        ("ring", "sends"),
        ("doubling", "sends"),
    ],
)
def test_race_check_fails_for_missing_dependency(name: str, field: str) -> None:
    prove_free_of_races(schedules(name, 5))
    with pytest.raises(AssertionError):
        prove_free_of_races([without_waiting(schedule, field) for schedule in schedules(name, 5)])


@pytest.mark.parametrize(("name", "field"), [("exchange", "after_sends"), ("ring", "sends")])
def test_simulator_shows_wrong_sums_for_missing_dependency(name: str, field: str) -> None:
    broken = [without_waiting(schedule, field) for schedule in schedules(name, 4)]
    memories = [[(at + 1) << (16 * rank) for at in range(48)] for rank in range(4)]
    wanted = [sum(cells) for cells in zip(*memories, strict=True)]
    wrong = 0
    for seed in range(8):
        try:
            wrong += any(after != wanted for after in Simulation(broken, memories, operator.add, seed).run())
        except AssertionError:
            wrong += 1
    assert wrong >= 4
