"""Schedule of a map: pure decisions, and a simulation of unlike workers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.runs.map_schedule import WorkerLoad, assign_items, count_to_give_back

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
        assert load.held + assigned.count(rank) <= max(load.held, 4096)
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


def test_worker_holds_a_few_seconds_of_work() -> None:
    assigned = assign_items(10_000, [WorkerLoad(0, 0.01), WorkerLoad(0, 0.1)], 0.1)
    assert (assigned.count(0), assigned.count(1)) == (401, 41)
    assert assign_items(10_000, [WorkerLoad(401, 0.01), WorkerLoad(41, 0.1)], 0.1) == ()


def test_horizon_is_at_most_half_of_the_time_left() -> None:
    """Guided self-scheduling: the pieces get smaller towards the end."""
    for left in (400, 100, 40, 10):  # items of 0.1 s on two workers
        assigned = assign_items(left, [WorkerLoad(0, 0.1), WorkerLoad(0, 0.1)], 0.01)
        held_s = assigned.count(0) * 0.1
        assert held_s <= max(0.025, min(4.0, left * 0.1 / 2 / 2)) + 2 * 0.1
        assert assigned.count(0) >= 1


def test_last_item_waits_for_the_worker_that_finishes_it_first() -> None:
    fast, slow = WorkerLoad(3, 1.0, 0.5), WorkerLoad(0, 60.0)
    assert assign_items(1, [fast, slow], 0.1) == ()
    assert 1 in assign_items(100, [fast, slow], 0.1), "with much to do the slow one helps"


def test_worker_that_is_late_is_not_waited_for() -> None:
    stuck, slow = WorkerLoad(1, 0.1, 90.0), WorkerLoad(0, 5.0)
    assert assign_items(3, [stuck, slow], 0.1) == (1, 1)


def test_worker_gives_back_only_if_another_one_is_idle() -> None:
    load = WorkerLoad(3, 2.0, 1.0)
    assert count_to_give_back(load, is_other_idle=True, waiting=0, round_s=0.1) == 2
    assert count_to_give_back(load, is_other_idle=False, waiting=0, round_s=0.1) == 0
    assert count_to_give_back(load, is_other_idle=True, waiting=4, round_s=0.1) == 0
    assert count_to_give_back(load._replace(held=1), is_other_idle=True, waiting=0, round_s=0.1) == 0
    short = WorkerLoad(3, 0.01)
    assert count_to_give_back(short, is_other_idle=True, waiting=0, round_s=1) == 0


def test_worker_keeps_work_until_the_next_assignment() -> None:
    load = WorkerLoad(401, 0.01)
    assert count_to_give_back(load, is_other_idle=True, waiting=0, round_s=0.1) == 375


class Simulation:
    """Workers of known speeds, with rounds of 0.1 s on a fake clock. An item that was begun stays."""

    def __init__(self, item_s: Sequence[float], count: int) -> None:
        self.item_s, self.waiting, self.now = item_s, count, 0.0
        self.held = [0] * len(item_s)
        self.busy_s = [0.0] * len(item_s)
        self.known = [0.0] * len(item_s)
        self.takes_part = [True] * len(item_s)
        self.is_other_idle = False

    def loads(self) -> list[WorkerLoad]:
        rows = zip(self.held, self.known, self.busy_s, self.takes_part, strict=True)
        return [WorkerLoad(*row) for row in rows]

    def compute(self, seconds: float = 0.1) -> None:
        """Let the workers compute what they hold."""
        self.now += seconds
        for rank, time_s in enumerate(self.item_s):
            if not self.held[rank]:
                continue
            self.busy_s[rank] += seconds
            done = min(self.held[rank], int(self.busy_s[rank] / time_s + 1e-9))
            self.held[rank] -= done
            self.busy_s[rank] = self.busy_s[rank] - done * time_s if self.held[rank] else 0.0
            if done:
                self.known[rank] = time_s

    def round(self) -> None:
        """Give items back, and assign those that wait."""
        for rank, load in enumerate(self.loads()):
            count = count_to_give_back(
                load, is_other_idle=self.is_other_idle, waiting=self.waiting, round_s=0.1
            )
            self.held[rank] -= count
            self.waiting += count
        ranks = assign_items(self.waiting, self.loads(), 0.1)
        for rank in ranks:
            self.held[rank] += 1
        self.waiting -= len(ranks)
        self.is_other_idle = any(not load.held for load in self.loads() if load.takes_part)

    def run(self, until_s: float = float("inf")) -> None:
        while (self.waiting or any(self.held)) and self.now < until_s:
            self.round()
            self.compute()


@pytest.mark.parametrize(
    ("item_s", "count"), [((0.05, 0.05, 0.1), 400), ((1.0, 1.0, 4.0), 60), ((0.2, 0.4, 0.8), 100)]
)
def test_simulated_unlike_workers_reach_most_of_their_sum(item_s: tuple[float, ...], count: int) -> None:
    """The last worker ends soon after the ideal time."""
    workers = Simulation(item_s, count)
    workers.run()
    assert workers.now <= count / sum(1 / seconds for seconds in item_s) * 1.08 + max(item_s)


def test_workers_compute_while_the_group_changes() -> None:
    """No items are assigned for 3 s: the end is not later for it."""
    workers = Simulation((0.1, 0.1, 0.2), 900)
    workers.run(until_s=10)
    for _ in range(30):
        workers.compute()
    assert all(workers.held)
    workers.run()
    assert workers.now <= 900 / 25 * 1.03


def test_worker_that_joins_near_the_end_gets_items_of_the_others() -> None:
    workers = Simulation((0.1, 0.1, 0.2), 900)
    workers.takes_part[0] = False
    workers.run(until_s=57)
    left = workers.waiting + sum(workers.held)
    workers.takes_part[0] = True
    workers.run()
    assert workers.now - 57 <= left / 25 + 0.5


def test_worker_that_becomes_slow_gives_its_items_back() -> None:
    workers = Simulation([0.1, 0.1], 200)
    workers.run(until_s=5)
    workers.item_s = [0.1, 2.0]
    left = workers.waiting + sum(workers.held)
    workers.run()
    assert workers.now - 5 <= left / (1 / 0.1 + 1 / 2.0) + 2.0 + 1.0
