"""Which ways a group can take, and the best route of each. Pure.

Roots, leaders and the order of trees are taken from a few candidates that only depend on which links are
faster or shorter than others; the candidate with the shortest time counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from barnraise.planning.cost.link_matrix import are_sites_separate
from barnraise.planning.cost.rings import MOST_EXACT
from barnraise.planning.cost.traffic_model import Route, Way, rooted_seconds, seconds, summed_seconds
from barnraise.planning.inputs.codecs import PlanCodec
from barnraise.planning.inputs.levels import AUTO, SHAPES, Shape, Strategy
from barnraise.planning.inputs.problem import Group, PlanProblem

_FEWEST_IN_TREE = 4
_ROOTS = 2

Sites = tuple[Group, ...]


class RouteSearch:
    """Finds routes for one question, and remembers them."""

    def __init__(self, question: PlanProblem) -> None:
        self._question = question
        self._found: dict[tuple[Group, Way], Route] = {}

    def ways(self, group: Group) -> tuple[Way, ...]:
        """The ways that exist for a group and that nobody has ruled out."""
        question = self._question
        levels = question.options.levels
        sites = self._sites(group)
        ways: list[Way] = []
        if levels.across.is_open or len(sites) == 1:
            fixed = levels.inside.all_reduce
            if fixed != "auto":
                ways.append(fixed)
            elif len(group) == 2:
                ways.append("ring")
            else:
                ways += ["ring", "star"]
                ways += ["tree"] if len(group) >= _FEWEST_IN_TREE else []
        # A session sums flat if a person has fixed how, and said nothing of sites.
        is_flat = question.options.is_flat and levels.across.is_open and levels.inside.all_reduce != AUTO
        if self._has_sites(group) and not is_flat:
            ways.append("sites")
        return tuple(ways)

    def _has_sites(self, group: Group) -> bool:
        inside, sites = self._question.options.levels.inside, self._sites(group)
        exact = inside.codec in (AUTO, self._question.exact.name) and inside.period in (AUTO, 1)
        return exact and 1 < len(sites) < len(group)

    def encoded_ways(self, group: Group) -> tuple[Way, ...]:
        """Those of sums in a codec's form; in a session, they go through sites wherever there are some."""
        if self._question.options.is_flat and self._has_sites(group):
            return ("sites",)
        return self.ways(group)

    def route(self, group: Group, way: Way, codec: PlanCodec) -> Route:
        """The best one found; it takes for ever where a path is missing."""
        if way == "ring":
            return Route("ring", self._question.ring(group, codec))
        if (group, way) not in self._found:
            found = self._through_sites(group) if way == "sites" else self._rooted(group, way)
            self._found[group, way] = found
        route = self._found[group, way]
        if way == "sites" and route.across == "ring":
            return route._replace(order=self._question.ring(tuple(sorted(route.order)), codec))
        return route

    def _sites(self, group: Group) -> Sites:
        inside = (tuple(one for one in site if one in group) for site in self._question.sites)
        sites = tuple(site for site in inside if site)
        # Sessions take machines apart by their rates alone.
        apart = not self._question.options.is_flat or are_sites_separate(sites, self._question.wires)
        return sites if apart else (group,)

    def _rooted(self, group: Group, way: Way) -> Route:
        question = self._question
        payload = question.payload(question.exact)
        routes = [Route(way, order) for order in self._orders(group, way)]
        return min(routes, key=lambda route: seconds(route, question.wires, payload, payload.size))

    def _orders(self, group: Group, way: str) -> list[Group]:
        """Candidates of a star or a tree: who is the root, and who is next to it."""
        if len(group) == 1:
            return [group]
        wires = self._question.wires

        def narrowest(one: int) -> float:
            return -min(wires.both(one, other) for other in group if other != one)

        def furthest(one: int) -> float:
            return max(wires.latency[one][other] for other in group if other != one)

        roots: Sequence[int] = group
        if way == "tree" or len(group) > MOST_EXACT:
            best = sorted(group, key=narrowest)[:_ROOTS] + sorted(group, key=furthest)[:_ROOTS]
            roots = tuple(dict.fromkeys(best))
        if way == "star":
            return [(root, *(one for one in group if one != root)) for root in roots]
        return list(dict.fromkeys(order for root in roots for order in self._around(group, root)))

    def _around(self, group: Group, root: int) -> Iterator[Group]:
        """The others behind their root: by the rate of its paths to them, or by their latency."""
        wires = self._question.wires
        others = [one for one in group if one != root]
        yield (root, *sorted(others, key=lambda one: -wires.both(root, one)))
        yield (root, *sorted(others, key=lambda one: wires.latency[root][one]))

    def _through_sites(self, group: Group) -> Route:
        question = self._question
        raw = question.payload(question.exact)
        sites = self._sites(group)
        routes = [
            self._led_by(tuple(self._chain(site, self._leader(site, group, by_rate)) for site in sites))
            for by_rate in (True, False)
        ]
        return min(routes, key=lambda route: seconds(route, question.wires, raw, raw.size))

    def _led_by(self, sites: Sites) -> Route:
        """The best shapes for sites whose leaders stand first."""
        question = self._question
        wires, levels = question.wires, question.options.levels
        payload = question.payload(question.exact)
        raw = payload.size
        leaders = tuple(sorted(site[0] for site in sites))
        orders: dict[Shape, Group] = {
            "ring": question.ring(leaders, question.exact),
            "tree": self._rooted(leaders, "tree").order,
            "star": self._rooted(leaders, "star").order,
        }

        def reducing(shape: Shape) -> float:
            return max(rooted_seconds(site, shape, wires, raw, 0.0) for site in sites)

        def giving_back(shape: Shape) -> float:
            return max(rooted_seconds(site, shape, wires, 0.0, raw) for site in sites)

        def summing(shape: Shape) -> float:
            return summed_seconds(orders[shape], shape, wires, payload)

        # A session's own groups take chains and rings where nothing is fixed.
        shapes: tuple[Shape, ...] = ("ring",) if question.options.is_flat else SHAPES
        across = _quickest(levels.across.all_reduce, shapes, summing)
        reduce = _quickest(levels.inside.reduce, shapes, reducing)
        broadcast = _quickest(levels.inside.broadcast, shapes, giving_back)
        return Route("sites", orders[across], sites, reduce, broadcast, across)

    def _leader(self, site: Group, group: Group, by_rate: bool) -> int:
        """Whoever has the fastest path to another site, or the shortest."""
        wires = self._question.wires
        outside = [one for one in group if one not in site]
        if by_rate:
            return max(site, key=lambda one: max(wires.both(one, other) for other in outside))
        return min(site, key=lambda one: min(wires.latency[one][other] for other in outside))

    def _chain(self, site: Group, leader: int) -> Group:
        """The site's ring, cut before its leader."""
        if len(site) < 2:
            return site
        ring = self._question.ring(site, self._question.exact)
        place = ring.index(leader)
        return ring[place:] + ring[:place]


def _quickest(fixed: Strategy, shapes: Sequence[Shape], time: Callable[[Shape], float]) -> Shape:
    return min(shapes, key=time) if fixed == "auto" else fixed
