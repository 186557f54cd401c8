"""Tables that fit the terminal, with any text in them."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.cli.tables import column_widths, shortened, table

CELLS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z", "M")), max_size=90)


def columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def test_table_that_fits_is_not_changed() -> None:
    assert table([("name", "state"), ("pc", "online")]) == "name  state\npc    online"


def test_columns_of_words_are_shortened_before_others() -> None:
    rows = [("run", "command", "state"), ("train-8f3z", "train.py " + "--flag " * 9, "running")]
    assert table(rows, words=(1,), width=40).splitlines() == [
        "run         command              state",
        "train-8f3z  train.py --flag --…  running",
    ]


def test_last_column_continues_below_if_it_wraps() -> None:
    rows = [("pc", "waits until the other machines of the run have their files")]
    assert table(rows, wraps=True, width=40).splitlines() == [
        "pc  waits until the other machines of",
        "    the run have their files",
    ]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS, CELLS, CELLS, CELLS), min_size=1, max_size=5),
    st.sets(st.integers(0, 5)),
    st.booleans(),
)
def test_no_line_is_wider_than_the_terminal(
    rows: list[tuple[str, ...]], words: set[int], wraps: bool
) -> None:
    text = table(rows, words=sorted(words), wraps=wraps, width=80)
    assert max(map(columns, text.splitlines()), default=0) <= 80


def test_column_widths_take_from_the_widest_column() -> None:
    assert column_widths([10, 40, 20], 60) == [10, 30, 20]
    assert column_widths([30, 30], 40, words=(1,)) == [28, 12]
    assert column_widths([30, 5], 40, words=(1,)) == [30, 5]


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("laptop", 6, "laptop"),
        ("laptops", 6, "lapto…"),
        ("over there", 6, "over…"),
        ("日本語", 5, "日本…"),
        ("日本語", 4, "日…"),
    ],
)
def test_shortened_text_shows_that_it_was_cut(text: str, width: int, shown: str) -> None:
    assert shortened(text, width) == shown
