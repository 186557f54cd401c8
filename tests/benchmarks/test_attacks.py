"""Every attack that a test of the lab names is known to the program that carries it out."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.attacks.__main__ import ATTACKS
from tests.repository import ROOT


def _named(file: Path) -> set[str]:
    return set(re.findall(r"\b(?:attack|start)\(\s*\"(\w+)\"", file.read_text(encoding="utf-8")))


def test_attacks_named_in_lab_tests_are_registered() -> None:
    named = {name for file in (ROOT / "tests" / "lab").glob("*.py") for name in _named(file)}
    assert len(named) > 20
    assert named - set(ATTACKS) == set()
