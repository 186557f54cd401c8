"""Topology graph: one canonical form, bounded, equal on every machine."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import ProtocolError
from barnraise.topology import Device, LinkFacts, NodeFacts, TopologyGraph, build_graph
from barnraise.topology.graph import decode_graph, encode_graph, ordered_pair
from tests.unit.changed_bytes import changed
from tests.unit.topology.graphs import mesh, node, parts


@settings(max_examples=40, deadline=None)
@given(parts())
def test_graph_encodes_and_decodes(made: tuple[list[NodeFacts], list[LinkFacts]]) -> None:
    graph = build_graph(*made)
    assert decode_graph(encode_graph(graph)) == graph
    assert msgspec.json.decode(msgspec.json.encode(graph), type=TopologyGraph) == graph
    assert hash(decode_graph(encode_graph(graph))) == hash(graph)


@settings(max_examples=40, deadline=None)
@given(parts(), st.randoms(use_true_random=False))
def test_build_graph_ignores_order_of_reports(
    made: tuple[list[NodeFacts], list[LinkFacts]], chance: random.Random
) -> None:
    nodes, links = made
    graph = build_graph(nodes, links)
    chance.shuffle(nodes)
    chance.shuffle(links)
    again = build_graph(nodes, links)
    assert again == graph
    assert encode_graph(again) == encode_graph(graph)
    assert again.digest() == graph.digest()


@settings(max_examples=40, deadline=None)
@given(parts())
def test_every_pair_is_linked_or_missing(made: tuple[list[NodeFacts], list[LinkFacts]]) -> None:
    graph = build_graph(*made)
    count = len(graph.nodes)
    missing = graph.missing_pairs()
    assert len(missing) + len(graph.links) == count * (count - 1) // 2
    for a, b in missing:
        assert graph.link(a, b) is None
    for link in graph.links:
        assert graph.link(link.a, link.b) is graph.link(link.b, link.a) is link
    for facts in graph.nodes:
        assert graph.node(facts.node) is facts
    assert graph.node("ff" * 32) is None or any(facts.node == "ff" * 32 for facts in graph.nodes)


@settings(max_examples=40, deadline=None)
@given(parts(), st.data())
def test_decode_graph_of_changed_bytes_gives_graph_or_protocol_error(
    made: tuple[list[NodeFacts], list[LinkFacts]], draw: st.DataObject
) -> None:
    data = draw.draw(changed([encode_graph(build_graph(*made))]))
    try:
        graph = decode_graph(data)
    except ProtocolError:
        return
    assert build_graph(graph.nodes, graph.links) == graph


def test_build_graph_keeps_newest_measurement() -> None:
    nodes = [NodeFacts(node=node(number), name="") for number in range(2)]

    def link(mbps: float | None, age: float | None) -> LinkFacts:
        return LinkFacts(a=node(0), b=node(1), rtt_s=0.001, mbps=mbps, measured_s_ago=age)

    reports = [link(None, None), link(100, 60), link(90, 5), link(None, 1)]
    assert build_graph(nodes, reports).links[0].mbps == 90
    strange = LinkFacts(a=node(0), b=node(9), rtt_s=0.001)
    assert build_graph(nodes, [strange]).links == (), "a link to an unknown node is left out"


def test_slowest_returns_link_with_least_bandwidth() -> None:
    graph = mesh(3)
    assert build_graph(graph.nodes).slowest() is None
    unmeasured = mesh(3, mbps=None)
    slow = msgspec.structs.replace(unmeasured.links[1], rtt_s=0.5)
    far = build_graph(unmeasured.nodes, [unmeasured.links[0], slow])
    assert far.slowest() == slow
    measured = msgspec.structs.replace(unmeasured.links[0], mbps=5.0)
    slower = msgspec.structs.replace(unmeasured.links[2], mbps=4.0)
    assert build_graph(graph.nodes, [measured, slow, slower]).slowest() == slower


def test_digest_ignores_age_of_measurements() -> None:
    graph = mesh(3)
    later = [msgspec.structs.replace(link, measured_s_ago=9999.0) for link in graph.links]
    assert build_graph(graph.nodes, later).digest() == graph.digest()
    faster = msgspec.structs.replace(graph.links[0], mbps=941.0)
    assert build_graph(graph.nodes, [faster, *graph.links[1:]]).digest() != graph.digest()


def test_facts_of_peer_beyond_limits_are_rejected() -> None:
    graph = mesh(3)
    raw = msgspec.to_builtins(graph)
    wrong = [
        {**raw, "nodes": raw["nodes"][::-1]},
        {**raw, "nodes": [*raw["nodes"], raw["nodes"][-1]]},
        {**raw, "links": raw["links"][::-1]},
        {**raw, "links": [{**raw["links"][0], "a": raw["links"][0]["b"], "b": raw["links"][0]["a"]}]},
        {**raw, "links": [{**raw["links"][0], "b": "ff" * 32}]},
        {**raw, "links": [{**raw["links"][0], "mbps": float("nan")}]},
        {**raw, "links": [{**raw["links"][0], "rtt_s": float("inf")}]},
        {**raw, "links": [{**raw["links"][0], "rtt_s": -1.0}]},
        {**raw, "links": [{**raw["links"][0], "reason": "x" * 301}]},
        {**raw, "nodes": [{**raw["nodes"][0], "name": "x" * 129}], "links": []},
        {**raw, "nodes": [{**raw["nodes"][0], "node": "../etc"}], "links": []},
        {**raw, "nodes": [{"node": f"{number:04x}", "name": ""} for number in range(257)], "links": []},
    ]
    for document in wrong:
        with pytest.raises(ProtocolError):
            decode_graph(msgspec.msgpack.encode(document))
    assert decode_graph(msgspec.msgpack.encode(raw)) == graph
    with pytest.raises(ProtocolError, match="larger"):
        decode_graph(bytes(17 << 20))


def test_devices_have_finite_figures() -> None:
    with pytest.raises(ValueError, match="finite"):
        Device("cpu", 0, "", 0, float("nan"))


def test_ordered_pair_sorts_by_id() -> None:
    assert ordered_pair("b", "a") == ordered_pair("a", "b") == ("a", "b")
