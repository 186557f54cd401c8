"""Comparison of runs: only facts that are not equal in all runs differ."""

from __future__ import annotations

import msgspec

from barnraise.display.comparison import differing, facts_of
from barnraise.history.view_builder import build_view
from benchmarks.invented_run import RUN, example_run

VIEW = build_view(example_run(), run=RUN)


def test_facts_say_what_differs() -> None:
    start = msgspec.structs.replace(VIEW.start, options=(("copies", "3"), ("env", "auto")))
    facts = [facts_of(VIEW), facts_of(msgspec.structs.replace(VIEW, start=start, step=5))]
    assert differing(facts) == ["--copies", "steps"]
    assert [fact["--copies"] for fact in facts] == ["2", "3"]


def test_missing_facts_are_left_out() -> None:
    facts = facts_of(msgspec.structs.replace(VIEW, curves=(), energy_j=None))
    assert "energy" not in facts
    assert not any(name.startswith("last") for name in facts)
