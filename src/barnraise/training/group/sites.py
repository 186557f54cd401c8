"""Which ranks of a group are at one site, by what the agents have measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from barnraise.core.errors import BarnraiseError
from barnraise.planning.cost.rank_layout import RankLayout, ranks_by_site
from barnraise.topology.graph import TopologyGraph

log = logging.getLogger("barnraise.training")

_SURVEY_S = 300.0


class SiteMap:
    """Remembers what was measured for a while: a group must not wait for it."""

    def __init__(self, survey: Callable[[], TopologyGraph]) -> None:
        self._survey = survey
        self._known: TopologyGraph | None = None
        self._survey_again = 0.0

    def ranks(self, machines: Sequence[str]) -> RankLayout:
        """``machines``: of every rank. None where nothing can be told apart."""
        try:
            known = self._known
            if known is None or time.monotonic() > self._survey_again or not _knows(known, machines):
                self._known = known = self._survey()
                self._survey_again = time.monotonic() + _SURVEY_S
            found = ranks_by_site(known, machines)
        except BarnraiseError as error:
            log.info("sites are not told apart: %s", error.message)
            return RankLayout()
        sites = found.sites
        if len(sites) > 1:
            log.info("sums go through %d sites, ranks %s", len(sites), " and ".join(map(str, sites)))
        elif sites:
            log.info("sums go around by ranks %s, which avoids the slowest links", sites[0])
        return found


def _knows(graph: TopologyGraph, machines: Sequence[str]) -> bool:
    known = {facts.node for facts in graph.nodes}
    return all(machine in known for machine in machines)
