"""How bytes go through a group, and how long that takes by its links. Pure arithmetic.

A ring adds while it passes on. Everything else is rooted: towards one machine along a chain, a tree or a
star, and back. Sites reduce to one machine each, these sum among themselves, and give the sum back. The
formulas know each link and each port; what machines spend on encrypting and adding is in the calibration.
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
    """Who sends to whom. ``sites``: each with its leader first; ``order`` then has the leaders."""

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


def seconds(route: Route, wires: LinkMatrix, payload: PlanPayload, raw: float) -> float:
    """Until all have the sum. ``raw``: the bytes of exact gradients, which travel to the leaders of sites."""
    if route.way == "sites":
        inside = [rooted_seconds(site, route.reduce, wires, raw, 0.0) for site in route.sites]
        return max(inside) + round_seconds(route, wires, payload)
    if route.way == "none":
        return 0.0
    return summed_seconds(route.order, route.way, wires, payload)


def flows(route: Route, payload: PlanPayload, raw: float) -> list[RouteFlow]:
    """All that is sent for one sum."""
    if route.way == "none":
        return []
    if route.way != "sites":
        return list(_summed_flows(route.order, route.way, payload))
    found = round_flows(route, payload)
    for site in route.sites:
        found += _rooted_flows(site, route.reduce, raw, 0.0)
    return found


def round_seconds(route: Route, wires: LinkMatrix, payload: PlanPayload, raw: float = 0.0) -> float:
    """Until all have what a round changed. ``raw``: of each machine's own change, as in `seconds`.

    Without it, all machines of a site have the same, so the sum only comes back.
    """
    if route.way != "sites" or raw:
        return seconds(route, wires, payload, raw)
    merged = payload.merged(len(route.sites))
    back = [rooted_seconds(site, route.broadcast, wires, 0.0, merged) for site in route.sites]
    return summed_seconds(route.order, route.across, wires, payload) + max(back)


def round_flows(route: Route, payload: PlanPayload, raw: float = 0.0) -> list[RouteFlow]:
    if route.way != "sites" or raw:
        return flows(route, payload, raw)
    found = list(_summed_flows(route.order, route.across, payload))
    for site in route.sites:
        found += _rooted_flows(site, route.broadcast, 0.0, payload.merged(len(route.sites)))
    return found


def ring_seconds(hop_s: float, machines: int, *, gathers: bool) -> float:
    """``hop_s``: the slowest hop of one piece: a part of the sum, or all that one machine sends."""
    return (machines - 1) * hop_s * (1 if gathers else 2)


def ring_piece(payload: PlanPayload, machines: int) -> float:
    return payload.size if payload.gathers else payload.size / machines


def ring_hop_s(order: Sequence[int], wires: LinkMatrix, piece: float) -> float:
    """The slowest hop of an order."""
    slowest = 0.0
    for place, target in enumerate(order):
        source = order[place - 1]
        rate = wires.rate[source][target]
        if rate <= 0:
            return float("inf")
        slowest = max(slowest, piece / rate + wires.latency[source][target])
    return slowest


def summed_seconds(order: Sequence[int], shape: str, wires: LinkMatrix, payload: PlanPayload) -> float:
    if len(order) < 2:
        return 0.0
    if shape == "ring":
        hop = ring_hop_s(order, wires, ring_piece(payload, len(order)))
        return ring_seconds(hop, len(order), gathers=payload.gathers)
    up, down = _up_and_down(shape, payload, len(order))
    return rooted_seconds(order, shape, wires, up, down)


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
    """Along a tree what was merged travels up already; to a star's middle each sends its own."""
    merged = payload.merged(machines)
    return (payload.size if shape == "star" else merged), merged


def rooted_seconds(order: Sequence[int], shape: str, wires: LinkMatrix, up: float, down: float) -> float:
    """``up`` bytes to the first of ``order`` and ``down`` from it, in pieces one behind the other.

    The slowest link or the busiest port sets the pace; the first piece takes the latency of the longest way.
    """
    parent = _PARENTS[shape]
    rate, latency = wires.rate, wires.latency
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
    for place, one in enumerate(order):
        pace = max(
            pace,
            arriving[place] / wires.in_port[one] if arriving[place] else 0.0,
            leaving[place] / wires.out_port[one] if leaving[place] else 0.0,
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
