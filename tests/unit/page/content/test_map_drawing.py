"""The map of machines and links: every machine is inside, and of many links the slowest are drawn."""

from __future__ import annotations

import pytest

from barnraise.history.view import LinkView, MachineView
from barnraise.page.content.map_drawing import HEIGHT, MOST_LINES, WIDTH, draw_map


def _machines(count: int) -> list[MachineView]:
    return [MachineView(node=f"{number:064x}", name=f"m{number}", state="trains") for number in range(count)]


def _link(a: int, b: int, mbps: float | None) -> LinkView:
    return LinkView(
        source=f"m{a}", target=f"m{b}", source_node=f"{a:064x}", target_node=f"{b:064x}", mbps=mbps
    )


@pytest.mark.parametrize("count", [0, 1, 2, 3, 14, 15, 64])
def test_machines_are_inside_of_the_drawing(count: int) -> None:
    drawing = draw_map(_machines(count), ())
    assert len(drawing.machines) == count
    for mark in drawing.machines:
        assert abs(mark.label_x) < WIDTH / 2
        assert abs(mark.label_y) < HEIGHT / 2


def test_line_has_the_slower_direction_and_slow_lines_are_marked() -> None:
    links = [_link(0, 1, 900), _link(1, 0, 950), _link(0, 2, 940), _link(1, 2, 40), _link(0, 0, 1)]
    drawing = draw_map(_machines(3), [*links, _link(0, 9, 5)])
    assert [(line.label, line.is_slow) for line in drawing.lines] == [
        ("40 Mbit/s", True),
        ("900 Mbit/s", False),
        ("940 Mbit/s", False),
    ]


def test_link_of_unknown_speed_is_drawn() -> None:
    (line,) = draw_map(_machines(2), [_link(0, 1, None)]).lines
    assert line.label == ""
    assert "speed unknown" in line.title


def test_only_the_slowest_of_many_links_are_drawn() -> None:
    links = [_link(a, b, 10.0 + a + b) for a in range(30) for b in range(a)]
    drawing = draw_map(_machines(30), links)
    assert len(drawing.lines) == MOST_LINES
    assert drawing.hidden == len(links) - MOST_LINES
    assert drawing.lines[0].title.startswith("m1 to m0: 11 Mbit/s")
