"""Text rendering of graphs, with names that cannot control the terminal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from barnraise.topology import Device, LinkFacts, NodeFacts, build_graph
from barnraise.topology.render import describe_device, draw_graph, main_device, short_device_name
from tests.unit.topology.graphs import machine, mesh, node, parts


def test_draw_graph_of_four_machines() -> None:
    cards = {
        0: machine(Device("cpu", 0, "Apple M3 Ultra", 96 << 30), Device("mps", 0, "Apple M3 GPU", 96 << 30)),
        1: machine(Device("cpu", 0, "AMD", 64 << 30, 1.0), Device("cuda", 0, "RTX 4090", 24 << 30, 61.25)),
    }
    names = ["mac-studio", "gaming-pc", "nas", "laptop"]
    nodes = [
        NodeFacts(node=node(number), name=name, machine=cards.get(number))
        for number, name in enumerate(names)
    ]

    def link(a: int, b: int, mbps: float | None, rtt_s: float) -> LinkFacts:
        return LinkFacts(a=node(a), b=node(b), mbps=mbps, rtt_s=rtt_s)

    links = [
        link(0, 1, 2350, 0.0003),
        link(0, 2, 941, 0.0004),
        link(1, 2, 94.1, 0.0021),
        link(1, 3, 22.5, 0.012),
        link(2, 3, None, 0.009),
    ]
    assert draw_graph(build_graph(nodes, links)) == "\n".join(
        [
            "A  mac-studio  Apple M3 GPU (mps), 96 GiB",
            "B  gaming-pc   RTX 4090 (cuda), 24 GiB, 61.2 TFLOPS",
            "C  nas",
            "D  laptop",
            "",
            "A     B     C     D",
            "●═════●     │     │   2.35 Gbit/s   300 µs",
            "●═════╪═════●     │    941 Mbit/s   400 µs",
            "│     ●─────●     │   94.1 Mbit/s   2.1 ms",
            "│     ●╌╌╌╌╌┼╌╌╌╌╌●   22.5 Mbit/s    12 ms  slowest",
            "│     │     ●·····●  not measured     9 ms",
            "○     │     │     ○       no link",
        ]
    )


@pytest.mark.parametrize("count", range(1, 9))
def test_draw_graph_of_few_machines_is_picture(count: int) -> None:
    text = draw_graph(mesh(count))
    assert all(f"box-{number}" in text for number in range(count))
    assert text.count("940 Mbit/s") == count * (count - 1) // 2
    assert max(map(len, text.splitlines())) <= 100


def test_draw_graph_of_many_machines_is_matrix() -> None:
    text = draw_graph(mesh(20))
    lines = text.splitlines()
    assert "Mbit/s above the diagonal" in lines[0]
    rows: dict[int, list[str]] = {number: [] for number in range(20)}
    for line in lines:
        if "box-" in line and "slowest" not in line:
            rows[int(line.split()[0]) - 1] += line.split()[2:]
    for number, row in rows.items():
        assert row == ["0.4"] * number + ["\\"] + ["940"] * (19 - number)


@settings(max_examples=40, deadline=None)
@given(parts(max_nodes=10))
def test_draw_graph_of_any_graph_is_printable(made: tuple[list[NodeFacts], list[LinkFacts]]) -> None:
    graph = build_graph(*made)
    text = draw_graph(graph)
    assert all(sign.isprintable() or sign == "\n" for sign in text)
    assert draw_graph(graph, plain=True).isascii()


def test_draw_graph_cleans_names_and_tells_equal_names_apart() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07" + "x" * 100
    nodes = [NodeFacts(node=node(1), name=evil), NodeFacts(node=node(2), name="nas")]
    nodes.append(NodeFacts(node=node(3), name="nas"))
    text = draw_graph(build_graph(nodes))
    assert "\x1b" not in text
    assert f"nas ({node(2)[:8]})" in text
    assert f"nas ({node(3)[:8]})" in text


def test_describe_device_and_main_device() -> None:
    assert describe_device(Device("cpu", 0, "", 0)) == "unknown (cpu)"
    assert main_device(machine()) is None
    slow, fast = Device("cuda", 0, "GT 1030", 2 << 30, 1.0), Device("cuda", 1, "RTX 4090", 24 << 30, 61.0)
    assert main_device(machine(Device("cpu", 0, "", 0, 99.0), slow, fast)) == fast


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz", "Core i7-9750H"),
        ("11th Gen Intel(R) Core(TM) i7-1185G7 @ 3.00GHz", "Core i7-1185G7"),
        ("AMD Ryzen 9 5950X 16-Core Processor", "Ryzen 9 5950X"),
        ("AMD Ryzen 7 7840U w/ Radeon 780M Graphics", "Ryzen 7 7840U w/ Radeon 780M"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("Apple M2 Pro", "Apple M2 Pro"),
        ("Intel(R) Xeon(R) Processor", "Xeon"),
        ("AMD", "AMD"),
    ],
)
def test_short_device_name_leaves_advertising_out(name: str, short: str) -> None:
    assert short_device_name(name) == short


@pytest.mark.parametrize("count", [8, 9, 23])
def test_graph_with_long_names_fits_eighty_columns(count: int) -> None:
    card = Device("cuda", 0, "NVIDIA Quadro RTX 8000 with Max-Q Design and more", 1020 << 30, 123.4)
    nodes = [NodeFacts(node=node(n), name=f"{n}{'x' * 60}", machine=machine(card)) for n in range(count)]
    links = [
        LinkFacts(a=node(a), b=node(b), mbps=100_000.0, rtt_s=0.123) for b in range(count) for a in range(b)
    ]
    assert max(map(len, draw_graph(build_graph(nodes, links)).splitlines())) <= 80
