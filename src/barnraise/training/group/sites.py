"""Site layout of a group: which ranks are at one site, by the links that the agents have measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from barnraise.core.errors import BarnraiseError
from barnraise.planning.cost.rank_layout import RankLayout, ranks_by_site
from barnraise.topology.graph import TopologyGraph

log = logging.getLogger("barnraise.training")

_CACHE_S = 300.0


class SiteMap:
    """Cached topology, so that a new group need not wait for a survey."""

    def __init__(self, survey: Callable[[], TopologyGraph]) -> None:
        self._survey = survey
        self._graph: TopologyGraph | None = None
        self._expires_at = 0.0

    def ranks(self, machines: Sequence[str]) -> RankLayout:
        """Return the ranks by site; ``machines``: node id of each rank.

        The layout is empty if sites cannot be distinguished.
        """
        try:
            graph = self._graph
            if graph is None or time.monotonic() > self._expires_at or not _has_all(graph, machines):
                self._graph = graph = self._survey()
                self._expires_at = time.monotonic() + _CACHE_S
            layout = ranks_by_site(graph, machines)
        except BarnraiseError as error:
            log.info("sites cannot be distinguished: %s", error.message)
            return RankLayout()
        sites = layout.sites
        if len(sites) > 1:
            log.info("all-reduce uses %d sites, ranks %s", len(sites), " and ".join(map(str, sites)))
        elif sites:
            log.info("all-reduce uses the ring %s, which avoids the slowest links", sites[0])
        return layout


def _has_all(graph: TopologyGraph, machines: Sequence[str]) -> bool:
    """Tell whether the graph contains all these machines."""
    known = {facts.node for facts in graph.nodes}
    return all(machine in known for machine in machines)
