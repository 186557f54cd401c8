"""The order of machines in a ring. Pure.

In every step of a ring all hops happen at once, so a ring is as slow as its slowest hop. The best order is
found exactly for up to nine machines, and for all subsets of them at once; beyond, it begins with the nearest
neighbours and exchanges what makes the slowest hop faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

Costs = numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.float64]]

MOST_EXACT = 9
_STARTS = 6


class RingTable:
    """The best ring of every subset of at most nine machines, for several tables of costs at once.

    ``costs[table, source, target]``: seconds of a hop, infinite where there is no path. A subset is a number
    whose bits are its machines.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        tables, count, _ = costs.shape
        # [target][source, table]: what a path costs that is made longer by one hop.
        into = [numpy.ascontiguousarray(costs[:, :, target].T) for target in range(count)]
        nobody = numpy.full((count, tables), numpy.inf)
        self._paths: list[Costs] = [nobody] * (1 << count)
        for subset in range(1, 1 << count):
            first = (subset & -subset).bit_length() - 1
            best = nobody.copy()
            if subset == 1 << first:
                best[first] = 0.0
            for last in range(first + 1, count):
                if subset >> last & 1:
                    best[last] = numpy.maximum(self._paths[subset ^ 1 << last], into[last]).min(axis=0)
            self._paths[subset] = best

    def order(self, subset: int, table: int = 0) -> tuple[int, ...]:
        """The subset's best ring, beginning with its first machine; any order if there is none."""
        costs = self._costs[table]
        members = tuple(one for one in range(len(costs)) if subset >> one & 1)
        last = members[0]
        order: list[int] = []
        while subset:
            reach = numpy.maximum(self._paths[subset][:, table], costs[:, last])
            last = int(reach.argmin())
            if reach[last] == numpy.inf:
                return members
            order.append(last)
            subset ^= 1 << last
        return tuple(reversed(order))


def ring_order(costs: Costs) -> tuple[int, ...]:
    """The order of all machines with the fastest slowest hop, or one near it; it begins with the first."""
    count = len(costs)
    if count <= MOST_EXACT:
        return RingTable(costs[numpy.newaxis]).order((1 << count) - 1)
    starts = range(0, count, max(1, count // _STARTS))
    orders = [_exchanged(_nearest(costs.tolist(), start), costs) for start in starts]
    best = min(orders, key=lambda order: (*_length(order, costs), order))
    place = best.index(0)
    return tuple(best[place:] + best[:place])


def _nearest(costs: Sequence[Sequence[float]], start: int) -> list[int]:
    order, left = [start], set(range(len(costs))) - {start}
    while left:
        here = costs[order[-1]]
        order.append(min(left, key=lambda one: (here[one], one)))
        left.remove(order[-1])
    return order


def _exchanged(order: list[int], costs: Costs) -> list[int]:
    """2-opt: while it helps, the slowest hop and another are replaced, and what is between them turned."""
    for _ in range(4 * len(order)):
        hops = costs[order, order[1:] + order[:1]]
        cut = (int(hops.argmax()) + 1) % len(order)
        turned = order[cut:] + order[:cut]
        length, end = _best_turn(turned, costs)
        if length >= _length(order, costs):
            return order
        order = turned[:end][::-1] + turned[end:]
    return order


def _best_turn(order: list[int], costs: Costs) -> tuple[tuple[float, float], int]:
    """How many machines at the beginning are best turned around, so that the last hop is another one."""
    ends = numpy.arange(2, len(order))
    there, back = costs[order[:-1], order[1:]], costs[order[1:], order[:-1]]
    order_at = numpy.array(order)
    joints = costs[order[0], order_at[ends]], costs[order[-1], order_at[ends - 1]]
    ahead = numpy.append(there, 0.0)[::-1]
    slowest = numpy.maximum.reduce(
        [numpy.maximum.accumulate(back)[ends - 2], numpy.maximum.accumulate(ahead)[::-1][ends], *joints]
    )
    total = back.cumsum()[ends - 2] + ahead.cumsum()[::-1][ends] + joints[0] + joints[1]
    best = int(numpy.lexsort((total, slowest))[0])
    return (float(slowest[best]), float(total[best])), int(ends[best])


def _length(order: Sequence[int], costs: Costs) -> tuple[float, float]:
    hops = costs[order, [*order[1:], order[0]]]
    return float(hops.max()), float(hops.sum())
