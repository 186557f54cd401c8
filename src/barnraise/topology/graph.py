"""Machines and links as one frozen graph in canonical order. Pure.

Planners read it. Two graphs with the same facts are equal and have the same bytes and digest.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.errors import ProtocolError
from barnraise.topology.devices import Figure, Machine, Word, require_finite

MOST_NODES = 256
_MOST_LINKS = MOST_NODES * (MOST_NODES - 1) // 2
_LARGEST = 16 * 1024 * 1024

NodeHex = Annotated[str, Meta(pattern=r"^[0-9a-f]{1,64}\Z")]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Text = Annotated[str, Meta(max_length=300)]
Pair = tuple[str, str]


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements between two machines; ``a`` is the one with the smaller id.

    ``mbps``: the slower direction, None before it was measured. ``measured_s_ago``: its age when the graph
    was made. ``address``: the one in use. ``reason``: why that address was chosen.
    """

    a: NodeHex
    b: NodeHex
    rtt_s: Seconds
    rtt_deviation_s: Seconds = 0.0
    mbps: Figure | None = None
    measured_s_ago: Seconds | None = None
    address: Text = ""
    reason: Text = ""

    def __post_init__(self) -> None:
        require_finite(self.rtt_s, self.rtt_deviation_s, self.mbps, self.measured_s_ago)
        if self.a >= self.b:
            raise ValueError("a link's ends are two nodes in order")


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Machine of the graph; ``machine`` is None until it has described itself."""

    node: NodeHex
    name: Word
    machine: Machine | None = None


class TopologyGraph(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes by id and links by their ends; `build_graph` sorts them."""

    nodes: Annotated[tuple[NodeFacts, ...], Meta(max_length=MOST_NODES)] = ()
    links: Annotated[tuple[LinkFacts, ...], Meta(max_length=_MOST_LINKS)] = ()

    def __post_init__(self) -> None:
        ids = [facts.node for facts in self.nodes]
        pairs = [_ends(link) for link in self.links]
        if ids != sorted(set(ids)) or pairs != sorted(set(pairs)):
            raise ValueError("the nodes and links of a graph are each there once and in order")
        if not {end for pair in pairs for end in pair} <= set(ids):
            raise ValueError("a link of a graph ends at a node that is not there")

    def node(self, node: str) -> NodeFacts | None:
        place = bisect_left(self.nodes, node, key=lambda facts: facts.node)
        is_known = place < len(self.nodes) and self.nodes[place].node == node
        return self.nodes[place] if is_known else None

    def restricted_to(self, nodes: Iterable[str]) -> TopologyGraph:
        """Return the graph of these nodes only, and of the links between them."""
        kept = frozenset(nodes)
        return TopologyGraph(
            nodes=tuple(facts for facts in self.nodes if facts.node in kept),
            links=tuple(link for link in self.links if {link.a, link.b} <= kept),
        )

    def link(self, a: str, b: str) -> LinkFacts | None:
        """Return the link between two nodes, in either order."""
        pair = ordered_pair(a, b)
        place = bisect_left(self.links, pair, key=_ends)
        is_known = place < len(self.links) and _ends(self.links[place]) == pair
        return self.links[place] if is_known else None

    def missing_pairs(self) -> tuple[Pair, ...]:
        """Return the pairs of nodes without a reported link."""
        known = {_ends(link) for link in self.links}
        ids = [facts.node for facts in self.nodes]
        pairs = ((a, b) for place, a in enumerate(ids) for b in ids[place + 1 :])
        return tuple(pair for pair in pairs if pair not in known)

    def whole(self) -> TopologyGraph:
        """Return the graph with a link for every pair, since machines of one cluster reach each other."""
        trip = max((link.rtt_s for link in self.links), default=0.0)
        unheard = [LinkFacts(a=a, b=b, rtt_s=trip) for a, b in self.missing_pairs()]
        return build_graph(self.nodes, (*self.links, *unheard))

    def slowest(self) -> LinkFacts | None:
        """Return the link with the least bandwidth, or the longest round trip if none was measured."""
        measured = [link for link in self.links if link.mbps is not None]
        if measured:
            return min(measured, key=lambda link: (link.mbps or 0.0, -link.rtt_s, link.a, link.b))
        return min(self.links, key=lambda link: (-link.rtt_s, link.a, link.b), default=None)

    def digest(self) -> str:
        """Return a hash of the facts without the ages of the measurements."""
        links = tuple(msgspec.structs.replace(link, measured_s_ago=None) for link in self.links)
        timeless = msgspec.structs.replace(self, links=links)
        return hashlib.sha256(msgspec.msgpack.encode(timeless)).hexdigest()


def build_graph(nodes: Iterable[NodeFacts], links: Iterable[LinkFacts] = ()) -> TopologyGraph:
    """Build a graph in canonical order. Of two reports about a link, the latest measurement counts."""
    known = {facts.node: facts for facts in nodes}
    best: dict[Pair, LinkFacts] = {}
    for link in links:
        if link.a not in known or link.b not in known:
            continue
        other = best.get((link.a, link.b))
        if other is None or _newer(link) < _newer(other):
            best[link.a, link.b] = link
    return TopologyGraph(
        nodes=tuple(known[node] for node in sorted(known)), links=tuple(best[pair] for pair in sorted(best))
    )


def ordered_pair(a: str, b: str) -> Pair:
    """Return the ends of a link in canonical order."""
    return (a, b) if a < b else (b, a)


def encode_graph(graph: TopologyGraph) -> bytes:
    return msgspec.msgpack.encode(graph)


def decode_graph(data: bytes) -> TopologyGraph:
    """Decode a graph; raise ProtocolError if it is not in canonical order."""
    if len(data) > _LARGEST:
        raise ProtocolError(f"a graph of {len(data)} bytes is larger than any cluster's")
    try:
        return msgspec.msgpack.decode(data, type=TopologyGraph)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # broken text is a ValueError
        raise ProtocolError(f"these bytes are not a graph: {error}") from error


def _ends(link: LinkFacts) -> Pair:
    return (link.a, link.b)


def _newer(link: LinkFacts) -> tuple[bool, float, float, bytes]:
    """Return a sort key that puts the report to keep first, for any order of the reports."""
    age = float("inf") if link.measured_s_ago is None else link.measured_s_ago
    return (link.mbps is None, age, link.rtt_s, msgspec.msgpack.encode(link))
