"""Failures of runs: the user can act on the text that is shown, and no process is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.agents.run_failures import CASES, FILE, Case, play, two_machines
from benchmarks.agents.runs import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[CommandLine, Path]]:
    with two_machines() as formed:
        yield formed


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_failed_run_shows_documented_text(stage: tuple[CommandLine, Path], case: Case) -> None:
    code, seen = play(*stage, case)
    assert code == case.code, seen[-3000:]
    for words in case.says:
        assert words in seen, f"{words!r} is not in:\n{seen[-3000:]}"


def test_documentation_shows_every_failure() -> None:
    text = FILE.read_text(encoding="utf-8")
    for case in CASES:
        assert f"# {case.title}\n" in text
        for words in case.says:
            assert words in text, f"{case.title}: {words!r}"
