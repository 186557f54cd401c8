"""Schedule of a map: pure decisions, and a simulation of unlike workers."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.runs.map_schedule import WorkerLoad, assign_items, should_give_back

LOADS = st.lists(
    st.builds(
        WorkerLoad,
        held=st.integers(0, 2000),
        item_s=st.floats(0, 1e4),
        busy_s=st.floats(0, 1e4),
        takes_part=st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@given(waiting=st.integers(0, 10**7), loads=LOADS, round_s=st.floats(0.01, 60))
def test_assignment_of_any_loads_is_bounded_and_makes_progress(
    waiting: int, loads: list[WorkerLoad], round_s: float
) -> None:
    assigned = assign_items(waiting, loads, round_s)
    assert len(assigned) <= waiting
    assert all(loads[rank].takes_part for rank in assigned)
    for rank, load in enumerate(loads):
        assert load.held + assigned.count(rank) <= max(load.held, 1024)
    taking = [load for load in loads if load.takes_part]
    if waiting and taking and all(load.held == 0 for load in taking):
        assert assigned, "no worker computes, so one must begin"


@pytest.mark.parametrize("busy_s", [0.1, 0.7, 1.3, 2.9, 7.77])
def test_nothing_is_assigned_when_nothing_waits(busy_s: float) -> None:
    for count in range(1, 4):
        assert assign_items(0, [WorkerLoad(3, 0.1, busy_s)] * count, 0.1) == ()
        assert assign_items(1, [WorkerLoad(0, 0.1), *[WorkerLoad(3, 0.1, busy_s)] * count], 0.1) == (0,)


def test_worker_of_unknown_speed_gets_one_item() -> None:
    assert assign_items(100, [WorkerLoad(0), WorkerLoad(0)], 0.1) == (0, 1)
    assert assign_items(100, [WorkerLoad(1), WorkerLoad(0)], 0.1) == (1,)


def test_fast_worker_holds_more_items() -> None:
    assigned = assign_items(1000, [WorkerLoad(0, 0.01), WorkerLoad(0, 0.1)], 0.1)
    assert (assigned.count(0), assigned.count(1)) == (26, 4)


def test_last_item_waits_for_the_worker_that_finishes_it_first() -> None:
    fast, slow = WorkerLoad(3, 1.0, 0.5), WorkerLoad(0, 60.0)
    assert assign_items(1, [fast, slow], 0.1) == ()
    assert assign_items(100, [fast, slow], 0.1) == (1,), "with much to do the slow one helps"


def test_worker_that_is_late_is_not_waited_for() -> None:
    stuck, slow = WorkerLoad(1, 0.1, 90.0), WorkerLoad(0, 5.0)
    assert assign_items(3, [stuck, slow], 0.1) == (1, 1)


def test_worker_gives_back_only_if_another_one_is_idle() -> None:
    load = WorkerLoad(3, 2.0, 1.0)
    assert should_give_back(load, is_other_idle=True, waiting=0, round_s=0.1)
    assert not should_give_back(load, is_other_idle=False, waiting=0, round_s=0.1)
    assert not should_give_back(load, is_other_idle=True, waiting=4, round_s=0.1)
    assert not should_give_back(load._replace(held=1), is_other_idle=True, waiting=0, round_s=0.1)
    short = WorkerLoad(3, 0.01)
    assert not should_give_back(short, is_other_idle=True, waiting=0, round_s=1)


@pytest.mark.parametrize(
    ("item_s", "count"), [((0.05, 0.05, 0.1), 400), ((1.0, 1.0, 4.0), 60), ((0.2, 0.4, 0.8), 100)]
)
def test_simulated_unlike_workers_reach_most_of_their_sum(item_s: tuple[float, ...], count: int) -> None:
    """Rounds of 0.1 s on a fake clock: the last worker ends soon after the ideal time."""
    held: list[list[float]] = [[] for _ in item_s]  # times at which each worker's items end
    now, waiting, known = 0.0, count, [0.0] * len(item_s)
    while waiting or any(held):
        for rank, ends in enumerate(held):
            while ends and ends[0] <= now:
                heapq.heappop(ends)
                known[rank] = item_s[rank]
        loads = [
            WorkerLoad(len(ends), known[rank], max(0.0, item_s[rank] - (ends[0] - now)) if ends else 0.0)
            for rank, ends in enumerate(held)
        ]
        for rank in assign_items(waiting, loads, 0.1):
            held[rank].append(max([now, *held[rank]]) + item_s[rank])
            waiting -= 1
        now += 0.1
    ideal = count / sum(1 / seconds for seconds in item_s)
    assert now <= ideal * 1.08 + max(item_s)
