"""Texts and attributes that are not ours never become markup."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from barnraise.display.charts.elements import element, markup, svg, svg_file
from tests.unit.display.hostile_run import ATTACK, html_tags


def test_text_and_attribute_are_escaped() -> None:
    text = markup(element("p", ATTACK, element("b", "x"), ATTACK, title=ATTACK))
    assert html_tags(text) == [("p", ["title"]), ("b", [])]
    assert not set(text) & {"\x1b", "\u202e"}


def test_attribute_names_and_numbers() -> None:
    shape = element("line", x1=1.25, stroke_width=2.0, class_="a", y1=None)
    assert shape.attrib == {"x1": "1.2", "stroke-width": "2", "class": "a"}


def test_number_that_is_not_finite_is_refused() -> None:
    with pytest.raises(AssertionError, match="finite"):
        element("line", x1=float("nan"))


def test_svg_file_is_well_formed_and_whole() -> None:
    text = svg_file(svg(10, 20, ATTACK, element("text", ATTACK)), ".a > .b { fill: red }")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert [child.tag.rpartition("}")[2] for child in root] == ["style", "text"]
