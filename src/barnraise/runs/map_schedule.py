"""Schedule of a map: which items each worker computes next, and which it gives back. Pure.

All workers call these functions with the same reports and get the same answer, so no item is assigned twice.
A worker holds few items at a time: those of a short horizon, and one more. Near the end an item waits for
the worker that would finish it first, even if that worker is busy and another one is idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_MIN_ITEM_S = 1e-6
_HORIZON_ROUNDS = 2.5
_MOST_HELD = 1024


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
    shares = _shares(waiting, loads)
    given = [
        max(0, min(share, _wanted(load, _HORIZON_ROUNDS * round_s) - load.held))
        for share, load in zip(shares, loads, strict=True)
    ]
    turns = range(max(given, default=0))
    return tuple(rank for turn in turns for rank, count in enumerate(given) if turn < count)[:waiting]


def should_give_back(load: WorkerLoad, *, is_other_idle: bool, waiting: int, round_s: float) -> bool:
    """Tell whether a worker should give back the items that it has not begun.

    It should when another worker has nothing to do, no item waits, and its own would take much longer than
    a round.
    """
    if not is_other_idle or waiting or load.held < 2:
        return False
    return _free_after(load, load.item_s) > 2 * round_s


def _shares(waiting: int, loads: Sequence[WorkerLoad]) -> list[int]:
    """Return how many of all waiting items each worker would get if all were to end at the same time."""
    times = _item_times(loads)
    free = [_free_after(load, time_s) for load, time_s in zip(loads, times, strict=True)]
    shares = [0] * len(loads)
    ranks = [rank for rank, load in enumerate(loads) if load.takes_part]
    if not ranks or not waiting:
        return shares
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
    return shares


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
