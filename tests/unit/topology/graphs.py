"""Graphs for tests: any valid one, and small ones that are easy to read."""

from __future__ import annotations

from hypothesis import strategies as st

from barnraise.topology import Device, LinkFacts, Machine, NodeFacts, TopologyGraph, build_graph

_words = st.text(max_size=24)
_figures = st.floats(0, 1e6)
_devices = st.builds(
    Device,
    st.sampled_from(["cpu", "cuda", "mps", "xpu"]),
    st.integers(0, 7),
    _words,
    st.integers(0, 2**45),
    st.none() | _figures,
    st.none() | _figures,
)
_machines = st.builds(
    Machine,
    os=_words,
    os_version=_words,
    arch=_words,
    cpu_name=_words,
    cores=st.integers(0, 256),
    memory_bytes=st.integers(0, 2**45),
    python=_words,
    torch=st.none() | _words,
    barnraise=_words,
    devices=st.lists(_devices, max_size=3).map(tuple),
    notes=st.lists(_words, max_size=3).map(tuple),
)
_ids = st.binary(min_size=1, max_size=32).map(bytes.hex)


@st.composite
def parts(draw: st.DrawFn, max_nodes: int = 6) -> tuple[list[NodeFacts], list[LinkFacts]]:
    """Draw nodes and links in any order, some pairs without a link and some with two reports."""
    ids = draw(st.lists(_ids, unique=True, max_size=max_nodes))
    nodes = [NodeFacts(node=node, name=draw(_words), machine=draw(st.none() | _machines)) for node in ids]
    links = []
    for first, a in enumerate(ids):
        for b in ids[first + 1 :]:
            for _ in range(draw(st.integers(0, 2))):
                links.append(
                    LinkFacts(
                        a=min(a, b),
                        b=max(a, b),
                        rtt_s=draw(st.floats(0, 10)),
                        rtt_deviation_s=draw(st.floats(0, 10)),
                        mbps=draw(st.none() | _figures),
                        measured_s_ago=draw(st.none() | st.floats(0, 1e6)),
                        address=draw(_words),
                        reason=draw(_words),
                    )
                )
    return draw(st.permutations(nodes)), draw(st.permutations(links))


def machine(*devices: Device) -> Machine:
    return Machine(
        os="linux",
        os_version="Debian 12",
        arch="x86_64",
        cpu_name="AMD Ryzen 9",
        cores=16,
        memory_bytes=32 << 30,
        python="3.12.1",
        torch="2.13.0",
        barnraise="0.1.0",
        devices=devices,
    )


def node(number: int) -> str:
    return f"{number:02x}" * 32


def mesh(count: int, mbps: float | None = 940.0, rtt_s: float = 0.0004) -> TopologyGraph:
    """Return a graph with equal links between all machines."""
    nodes = [NodeFacts(node=node(number), name=f"box-{number}") for number in range(count)]
    links = [
        LinkFacts(a=node(a), b=node(b), rtt_s=rtt_s, mbps=mbps, measured_s_ago=None if mbps is None else 60.0)
        for a in range(count)
        for b in range(a + 1, count)
    ]
    return build_graph(nodes, links)
