"""Order of machines in a ring. Pure.

All hops of a ring step happen at once, so a ring is as slow as its slowest hop. For up to nine machines the
best order is found exactly, for all subsets at once. For more machines a nearest-neighbour order is improved
by 2-opt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

Costs = numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.float64]]

MAX_EXACT = 9
_STARTS = 6


class RingTable:
    """Best ring of every subset of at most nine machines, for several cost tables at once.

    ``costs[table, source, target]``: seconds of a hop, infinite without a path. A subset is a bit mask of
    machines.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        tables, count, _ = costs.shape
        # [target][source, table]: what a path costs that is made longer by one hop.
        into = [numpy.ascontiguousarray(costs[:, :, target].T) for target in range(count)]
        unreachable = numpy.full((count, tables), numpy.inf)
        self._paths: list[Costs] = [unreachable] * (1 << count)
        for subset in range(1, 1 << count):
            first = (subset & -subset).bit_length() - 1
            best = unreachable.copy()
            if subset == 1 << first:
                best[first] = 0.0
            for last in range(first + 1, count):
                if subset >> last & 1:
                    best[last] = numpy.maximum(self._paths[subset ^ 1 << last], into[last]).min(axis=0)
            self._paths[subset] = best

    def order(self, subset: int, table: int = 0) -> tuple[int, ...]:
        """Return the best ring of a subset, starting with its first machine; any order if there is none."""
        costs = self._costs[table]
        members = tuple(member for member in range(len(costs)) if subset >> member & 1)
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
    """Return the order of all machines with the fastest slowest hop, or close to it; it starts with the
    first.
    """
    count = len(costs)
    if count <= MAX_EXACT:
        return RingTable(costs[numpy.newaxis]).order((1 << count) - 1)
    starts = range(0, count, max(1, count // _STARTS))
    orders = [_improve_2opt(_nearest_neighbours(costs.tolist(), start), costs) for start in starts]
    best = min(orders, key=lambda order: (*_length(order, costs), order))
    place = best.index(0)
    return tuple(best[place:] + best[:place])


def _nearest_neighbours(costs: Sequence[Sequence[float]], start: int) -> list[int]:
    order, remaining = [start], set(range(len(costs))) - {start}
    while remaining:
        here = costs[order[-1]]
        order.append(min(remaining, key=lambda member: (here[member], member)))
        remaining.remove(order[-1])
    return order


def _improve_2opt(order: list[int], costs: Costs) -> list[int]:
    """Apply 2-opt to an order: replace the slowest hop and another one, as long as that helps."""
    for _ in range(4 * len(order)):
        hops = costs[order, order[1:] + order[:1]]
        cut = (int(hops.argmax()) + 1) % len(order)
        turned = order[cut:] + order[:cut]
        length, end = _best_reversal(turned, costs)
        if length >= _length(order, costs):
            return order
        order = turned[:end][::-1] + turned[end:]
    return order


def _best_reversal(order: list[int], costs: Costs) -> tuple[tuple[float, float], int]:
    """Return how many leading machines to reverse, so that the last hop is replaced."""
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
