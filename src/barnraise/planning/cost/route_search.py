"""Search for the best all-reduce route of a group. Pure.

Roots, leaders and tree orders come from a few candidates. These depend only on which links are faster or
shorter than others. The candidate with the shortest time is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from barnraise.planning.cost.link_matrix import are_sites_separate
from barnraise.planning.cost.rings import MAX_EXACT
from barnraise.planning.cost.traffic_model import Route, Way, rooted_seconds, seconds, summed_seconds
from barnraise.planning.inputs.codecs import PlanCodec
from barnraise.planning.inputs.levels import AUTO, SHAPES, Shape, Strategy
from barnraise.planning.inputs.problem import Group, PlanProblem

_MIN_TREE_SIZE = 4
_ROOT_CANDIDATES = 2

Sites = tuple[Group, ...]


class RouteSearch:
    """Search of routes for one problem, with a cache."""

    def __init__(self, problem: PlanProblem) -> None:
        self._problem = problem
        self._routes: dict[tuple[Group, Way], Route] = {}

    def ways(self, group: Group) -> tuple[Way, ...]:
        """Return the all-reduce shapes that are possible for a group and allowed by the user."""
        problem = self._problem
        levels = problem.options.levels
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
                ways += ["tree"] if len(group) >= _MIN_TREE_SIZE else []
        # A session uses a flat all-reduce if a person has fixed its shape and set nothing for sites.
        is_flat = problem.options.is_flat and levels.across.is_open and levels.inside.all_reduce != AUTO
        if self._has_sites(group) and not is_flat:
            ways.append("sites")
        return tuple(ways)

    def _has_sites(self, group: Group) -> bool:
        inside, sites = self._problem.options.levels.inside, self._sites(group)
        exact = inside.codec in (AUTO, self._problem.exact.name) and inside.period in (AUTO, 1)
        return exact and 1 < len(sites) < len(group)

    def encoded_ways(self, group: Group) -> tuple[Way, ...]:
        """Return the shapes for encoded gradients; a session uses sites if there are any."""
        if self._problem.options.is_flat and self._has_sites(group):
            return ("sites",)
        return self.ways(group)

    def route(self, group: Group, way: Way, codec: PlanCodec) -> Route:
        """Return the best route of a shape; its time is infinite if a path is missing."""
        if way == "ring":
            return Route("ring", self._problem.ring(group, codec))
        if (group, way) not in self._routes:
            new_route = self._through_sites(group) if way == "sites" else self._rooted(group, way)
            self._routes[group, way] = new_route
        route = self._routes[group, way]
        if way == "sites" and route.across == "ring":
            return route._replace(order=self._problem.ring(tuple(sorted(route.order)), codec))
        return route

    def _sites(self, group: Group) -> Sites:
        inside = (tuple(member for member in site if member in group) for site in self._problem.sites)
        sites = tuple(site for site in inside if site)
        # Sessions separate sites by link rates only.
        apart = not self._problem.options.is_flat or are_sites_separate(sites, self._problem.links)
        return sites if apart else (group,)

    def _rooted(self, group: Group, way: Way) -> Route:
        problem = self._problem
        payload = problem.payload(problem.exact)
        routes = [Route(way, order) for order in self._orders(group, way)]
        return min(routes, key=lambda route: seconds(route, problem.links, payload, payload.size))

    def _orders(self, group: Group, way: str) -> list[Group]:
        """Return candidate orders of a star or tree: the root and the machines next to it."""
        if len(group) == 1:
            return [group]
        links = self._problem.links

        def narrowest(member: int) -> float:
            return -min(links.slower_rate(member, other) for other in group if other != member)

        def furthest(member: int) -> float:
            return max(links.latency[member][other] for other in group if other != member)

        roots: Sequence[int] = group
        if way == "tree" or len(group) > MAX_EXACT:
            best = (
                sorted(group, key=narrowest)[:_ROOT_CANDIDATES]
                + sorted(group, key=furthest)[:_ROOT_CANDIDATES]
            )
            roots = tuple(dict.fromkeys(best))
        if way == "star":
            return [(root, *(member for member in group if member != root)) for root in roots]
        return list(dict.fromkeys(order for root in roots for order in self._orders_behind_root(group, root)))

    def _orders_behind_root(self, group: Group, root: int) -> Iterator[Group]:
        """Yield the other machines behind their root: by the rate of its links, and by latency."""
        links = self._problem.links
        others = [member for member in group if member != root]
        yield (root, *sorted(others, key=lambda member: -links.slower_rate(root, member)))
        yield (root, *sorted(others, key=lambda member: links.latency[root][member]))

    def _through_sites(self, group: Group) -> Route:
        problem = self._problem
        raw = problem.payload(problem.exact)
        sites = self._sites(group)
        routes = [
            self._best_shapes(tuple(self._chain(site, self._leader(site, group, by_rate)) for site in sites))
            for by_rate in (True, False)
        ]
        return min(routes, key=lambda route: seconds(route, problem.links, raw, raw.size))

    def _best_shapes(self, sites: Sites) -> Route:
        """Return the route with the fastest shapes for sites whose leaders come first."""
        problem = self._problem
        links, levels = problem.links, problem.options.levels
        payload = problem.payload(problem.exact)
        raw = payload.size
        leaders = tuple(sorted(site[0] for site in sites))
        orders: dict[Shape, Group] = {
            "ring": problem.ring(leaders, problem.exact),
            "tree": self._rooted(leaders, "tree").order,
            "star": self._rooted(leaders, "star").order,
        }

        def reduce_s(shape: Shape) -> float:
            return max(rooted_seconds(site, shape, links, raw, 0.0) for site in sites)

        def broadcast_s(shape: Shape) -> float:
            return max(rooted_seconds(site, shape, links, 0.0, raw) for site in sites)

        def all_reduce_s(shape: Shape) -> float:
            return summed_seconds(orders[shape], shape, links, payload)

        # A session uses chains and rings where nothing is fixed.
        shapes: tuple[Shape, ...] = ("ring",) if problem.options.is_flat else SHAPES
        across = _fastest_shape(levels.across.all_reduce, shapes, all_reduce_s)
        reduce = _fastest_shape(levels.inside.reduce, shapes, reduce_s)
        broadcast = _fastest_shape(levels.inside.broadcast, shapes, broadcast_s)
        return Route("sites", orders[across], sites, reduce, broadcast, across)

    def _leader(self, site: Group, group: Group, by_rate: bool) -> int:
        """Return the machine of a site with the fastest link, or the shortest one, to another site."""
        links = self._problem.links
        outside = [member for member in group if member not in site]
        if by_rate:
            return max(site, key=lambda member: max(links.slower_rate(member, other) for other in outside))
        return min(site, key=lambda member: min(links.latency[member][other] for other in outside))

    def _chain(self, site: Group, leader: int) -> Group:
        """Return the ring of a site, cut before its leader."""
        if len(site) < 2:
            return site
        ring = self._problem.ring(site, self._problem.exact)
        place = ring.index(leader)
        return ring[place:] + ring[:place]


def _fastest_shape(fixed: Strategy, shapes: Sequence[Shape], time: Callable[[Shape], float]) -> Shape:
    return min(shapes, key=time) if fixed == "auto" else fixed
