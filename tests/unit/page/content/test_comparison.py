"""Comparison of runs: equal properties are not marked, others are."""

from __future__ import annotations

import msgspec

from barnraise.history.view_builder import build_view
from barnraise.page.content.comparison import common_metric, compare
from tests.unit.history.example_run import RUN, example_run

VIEW = build_view(example_run(), run=RUN)


def test_rows_say_what_differs() -> None:
    start = msgspec.structs.replace(VIEW.start, options=(("copies", "3"), ("env", "auto")))
    rows = {row.name: row for row in compare([VIEW, msgspec.structs.replace(VIEW, start=start, step=5)])}
    assert rows["option copies"].values == ("2", "3")
    assert rows["option copies"].differs
    assert not rows["option env"].differs
    assert rows["steps"].values == ("600", "5")
    assert not rows["last loss"].differs


def test_missing_values_are_shown_as_unknown() -> None:
    rows = {row.name: row for row in compare([VIEW, msgspec.structs.replace(VIEW, curves=(), energy_j=None)])}
    assert rows["last loss"].values[1] == "–"
    assert rows["energy"].values[1] == "–"


def test_metric_is_of_the_first_run_that_has_one() -> None:
    assert common_metric([msgspec.structs.replace(VIEW, metric=""), VIEW]) == "loss"
    assert common_metric([]) == ""
