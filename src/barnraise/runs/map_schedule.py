"""Schedule of a map: which items each worker computes next, and which it gives back. Pure.

All workers call these functions with the same reports and get the same answer, so no item is assigned twice.
A worker holds the items of a horizon, and one more. The horizon is a few seconds, so that workers go on while
the group changes. It is at most half of the time that is left, as in guided self-scheduling. Near the end an
item waits for the worker that would finish it first, even if that worker is busy and another one is idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_MIN_ITEM_S = 1e-6
_HORIZON_ROUNDS = 2.5  # the shortest horizon
_HORIZON_S = 4.0  # the longest one: a change of the group takes less
_MOST_HELD = 4096


class WorkerLoad(NamedTuple):
    """The load of a worker, as it has reported it. ``item_s``: seconds of an item, 0 while unknown.

    ``held``: its unfinished items, with the one that it computes. ``busy_s``: seconds since it began it.
    """

    held: int
    item_s: float = 0.0
    busy_s: float = 0.0
    takes_part: bool = True


def assign_items(waiting: int, loads: Sequence[WorkerLoad], round_s: float) -> tuple[int, ...]:
    """Return the ranks that get the first waiting items, in order; fewer than ``waiting`` if all have enough.

    ``round_s``: seconds between two calls. An item that a busy worker would finish first stays unassigned.
    """
    shares, end_s = _shares(waiting, loads)
    horizon_s = max(_HORIZON_ROUNDS * round_s, min(_HORIZON_S, end_s / 2))
    given = [
        max(0, min(share, _wanted(load, horizon_s) - load.held))
        for share, load in zip(shares, loads, strict=True)
    ]
    turns = range(max(given, default=0))
    return tuple(rank for turn in turns for rank, count in enumerate(given) if turn < count)[:waiting]


def count_to_give_back(load: WorkerLoad, *, is_other_idle: bool, waiting: int, round_s: float) -> int:
    """Return how many of the items that a worker has not begun it should give back.

    It should when another worker has nothing to do and no item waits. It keeps the items of the shortest
    horizon, so that it computes until the items are assigned again.
    """
    if not is_other_idle or waiting or load.held < 2:
        return 0
    if _free_after(load, load.item_s) <= 2 * round_s:
        return 0
    kept = math.floor(_HORIZON_ROUNDS * round_s / max(load.item_s, _MIN_ITEM_S))
    return max(0, load.held - 1 - kept)


def _shares(waiting: int, loads: Sequence[WorkerLoad]) -> tuple[list[int], float]:
    """Return how many of the waiting items each worker would get if all were to end at the same time.

    Return also in how many seconds that is.
    """
    times = _item_times(loads)
    free = [_free_after(load, time_s) for load, time_s in zip(loads, times, strict=True)]
    shares = [0] * len(loads)
    ranks = [rank for rank, load in enumerate(loads) if load.takes_part]
    if not ranks or not waiting:
        return shares, 0.0
    while True:
        rate = sum(1 / times[rank] for rank in ranks)
        end_s = (waiting + sum(free[rank] / times[rank] for rank in ranks)) / rate
        latest = max(ranks, key=lambda rank: free[rank])
        if free[latest] <= end_s or len(ranks) == 1:
            break
        ranks.remove(latest)
    for rank in ranks:
        shares[rank] = max(0, math.floor((end_s - free[rank]) / times[rank]))
    for _ in range(waiting - sum(shares)):
        soonest = min(ranks, key=lambda rank: (free[rank] + (shares[rank] + 1) * times[rank], rank))
        shares[soonest] += 1
    return shares, end_s


def _wanted(load: WorkerLoad, horizon_s: float) -> int:
    """Return how many items a worker should hold; one until its speed is known."""
    if not load.item_s:
        return 1
    return min(_MOST_HELD, 1 + math.ceil(horizon_s / max(load.item_s, _MIN_ITEM_S)))


def _item_times(loads: Sequence[WorkerLoad]) -> list[float]:
    """Return the seconds of an item on each worker; an unknown time counts as the longest known one."""
    longest = max((load.item_s for load in loads), default=0.0) or 1.0
    return [max(load.item_s or longest, _MIN_ITEM_S) for load in loads]


def _free_after(load: WorkerLoad, item_s: float) -> float:
    """Return in how many seconds a worker has finished what it holds.

    A worker that is late with its item is expected to take as long again as it is late.
    """
    if not load.held:
        return 0.0
    return abs(item_s - load.busy_s) + (load.held - 1) * item_s
