"""Traffic model of an all-reduce: bytes and seconds of each route. Pure arithmetic.

A ring adds while it passes data on. All other routes have a root: data flows towards one machine along a
chain, a tree or a star, and back. Sites reduce to one leader each, the leaders all-reduce, and each leader
broadcasts. The formulas use each link and each port. Encryption and additions are part of the calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from barnraise.planning.cost.link_matrix import LinkMatrix
from barnraise.planning.inputs.codecs import PlanPayload
from barnraise.planning.inputs.levels import Shape

Way = Literal["none", "ring", "tree", "star", "sites"]

# A tree of two children, numbered as the collectives number theirs; a ring to one machine is a chain.
_PARENTS: dict[str, Callable[[int], int]] = {
    "ring": lambda place: place - 1,
    "tree": lambda place: (place - 1) // 2,
    "star": lambda place: 0,
}


class Route(NamedTuple):
    """Route of an all-reduce. ``sites``: each with its leader first; ``order`` then has the leaders."""

    way: Way
    order: tuple[int, ...]
    sites: tuple[tuple[int, ...], ...] = ()
    reduce: Shape = "ring"
    broadcast: Shape = "ring"
    across: Shape = "ring"


class RouteFlow(NamedTuple):
    """Bytes that one machine sends to another."""

    source: int
    target: int
    size: float


def seconds(route: Route, links: LinkMatrix, payload: PlanPayload, raw: float) -> float:
    """Return the seconds until all machines have the sum.

    ``raw``: bytes of exact gradients, which go to the leaders of sites.
    """
    if route.way == "sites":
        inside = [rooted_seconds(site, route.reduce, links, raw, 0.0) for site in route.sites]
        return max(inside) + round_seconds(route, links, payload)
    if route.way == "none":
        return 0.0
    return summed_seconds(route.order, route.way, links, payload)


def flows(route: Route, payload: PlanPayload, raw: float) -> list[RouteFlow]:
    """Return all transfers of one all-reduce."""
    if route.way == "none":
        return []
    if route.way != "sites":
        return list(_summed_flows(route.order, route.way, payload))
    transfers = round_flows(route, payload)
    for site in route.sites:
        transfers += _rooted_flows(site, route.reduce, raw, 0.0)
    return transfers


def round_seconds(route: Route, links: LinkMatrix, payload: PlanPayload, raw: float = 0.0) -> float:
    """Return the seconds until all machines have the change of a round.

    ``raw``: bytes of each machine's own change, as in `seconds`. If it is 0, the machines of a site hold the
    same change, so that only the broadcast is needed.
    """
    if route.way != "sites" or raw:
        return seconds(route, links, payload, raw)
    merged = payload.merged(len(route.sites))
    back = [rooted_seconds(site, route.broadcast, links, 0.0, merged) for site in route.sites]
    return summed_seconds(route.order, route.across, links, payload) + max(back)


def round_flows(route: Route, payload: PlanPayload, raw: float = 0.0) -> list[RouteFlow]:
    if route.way != "sites" or raw:
        return flows(route, payload, raw)
    transfers = list(_summed_flows(route.order, route.across, payload))
    for site in route.sites:
        transfers += _rooted_flows(site, route.broadcast, 0.0, payload.merged(len(route.sites)))
    return transfers


def ring_seconds(hop_s: float, machines: int, *, gathers: bool) -> float:
    """Return the seconds of a ring. ``hop_s``: the slowest hop of one chunk."""
    return (machines - 1) * hop_s * (1 if gathers else 2)


def ring_piece(payload: PlanPayload, machines: int) -> float:
    return payload.size if payload.gathers else payload.size / machines


def ring_hop_s(order: Sequence[int], links: LinkMatrix, piece: float) -> float:
    """Return the seconds of the slowest hop of an order."""
    slowest = 0.0
    for place, target in enumerate(order):
        source = order[place - 1]
        rate = links.rate[source][target]
        if rate <= 0:
            return float("inf")
        slowest = max(slowest, piece / rate + links.latency[source][target])
    return slowest


def summed_seconds(order: Sequence[int], shape: str, links: LinkMatrix, payload: PlanPayload) -> float:
    if len(order) < 2:
        return 0.0
    if shape == "ring":
        hop = ring_hop_s(order, links, ring_piece(payload, len(order)))
        return ring_seconds(hop, len(order), gathers=payload.gathers)
    up, down = _up_and_down(shape, payload, len(order))
    return rooted_seconds(order, shape, links, up, down)


def _summed_flows(order: Sequence[int], shape: str, payload: PlanPayload) -> Iterator[RouteFlow]:
    if len(order) < 2:
        return
    if shape == "ring":
        size = ring_seconds(ring_piece(payload, len(order)), len(order), gathers=payload.gathers)
        for place, target in enumerate(order):
            yield RouteFlow(order[place - 1], target, size)
        return
    yield from _rooted_flows(order, shape, *_up_and_down(shape, payload, len(order)))


def _up_and_down(shape: str, payload: PlanPayload, machines: int) -> tuple[float, float]:
    """Return the bytes towards the root and back; a tree sends merged data up, a star does not."""
    merged = payload.merged(machines)
    return (payload.size if shape == "star" else merged), merged


def rooted_seconds(order: Sequence[int], shape: str, links: LinkMatrix, up: float, down: float) -> float:
    """Return the seconds for ``up`` bytes to the first of ``order`` and ``down`` bytes back, in a pipeline.

    The slowest link or the busiest port sets the pace. The first chunk adds the latency of the longest path.
    """
    parent = _PARENTS[shape]
    rate, latency = links.rate, links.latency
    arriving = [0.0] * len(order)
    leaving = [0.0] * len(order)
    way_up = [0.0] * len(order)
    way_down = [0.0] * len(order)
    slowest_up = slowest_down = float("inf")
    for place in range(1, len(order)):
        above = parent(place)
        child, root = order[place], order[above]
        slowest_up = min(slowest_up, rate[child][root])
        slowest_down = min(slowest_down, rate[root][child])
        leaving[place] += up
        arriving[above] += up
        leaving[above] += down
        arriving[place] += down
        way_up[place] = way_up[above] + latency[child][root]
        way_down[place] = way_down[above] + latency[root][child]
    if (up and not slowest_up) or (down and not slowest_down):
        return float("inf")
    pace = max(up / slowest_up if up else 0.0, down / slowest_down if down else 0.0)
    for place, member in enumerate(order):
        pace = max(
            pace,
            arriving[place] / links.in_port[member] if arriving[place] else 0.0,
            leaving[place] / links.out_port[member] if leaving[place] else 0.0,
        )
    return pace + (max(way_up) if up else 0.0) + (max(way_down) if down else 0.0)


def _rooted_flows(order: Sequence[int], shape: str, up: float, down: float) -> Iterator[RouteFlow]:
    parent = _PARENTS[shape]
    for place in range(1, len(order)):
        child, root = order[place], order[parent(place)]
        if up:
            yield RouteFlow(child, root, up)
        if down:
            yield RouteFlow(root, child, down)
