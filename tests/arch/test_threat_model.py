"""The threat model names for each role what shows each line; all these tests and attacks exist."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest

from benchmarks.attacks.registry import ROLES, all_attacks
from tests.arch.source_tree import ROOT

_PAGE = ROOT / "docs" / "threat-model.md"
_ROW = re.compile(r"^\| (can|cannot) \| (.+) \| (.+) \|$", re.MULTILINE)
_NAME = re.compile(r"`([^`]+)`")


def _sections() -> dict[str, list[tuple[str, str, str]]]:
    """Return the rows of each role's section: can or cannot, the claim, what shows it."""
    text = _PAGE.read_text(encoding="utf-8").partition("## What each role can do")[2].partition("\n## ")[0]
    parts = re.split(r"^### (.+)$", text, flags=re.MULTILINE)[1:]
    return {name.lower(): _ROW.findall(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}


_ROWS = [(role, row) for role, rows in _sections().items() for row in rows]


def test_page_has_a_section_for_each_role_of_the_attacks() -> None:
    assert set(_sections()) == {role.lower() for role in ROLES}


@pytest.mark.parametrize("role", ROLES)
def test_section_says_what_its_role_can_and_cannot_do(role: str) -> None:
    assert {kind for kind, _, _ in _sections()[role.lower()]} == {"can", "cannot"}


def _exists(name: str, role: str) -> bool:
    if not name.startswith("tests/"):
        return any(fnmatchcase(known.id, name) and known.role.lower() == role for known in all_attacks())
    path, _, function = name.partition("::")
    file = ROOT / path
    if not file.is_file():
        return False
    return not function or f"def {function}(" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(("role", "row"), _ROWS, ids=[f"{role}: {row[1][:40]}" for role, row in _ROWS])
def test_line_names_tests_and_attacks_that_exist(role: str, row: tuple[str, str, str]) -> None:
    names = _NAME.findall(row[2])
    assert names, f"nothing shows: {row[1]}"
    assert [name for name in names if not _exists(name, role)] == []


def test_every_attack_is_named_in_the_section_of_its_role() -> None:
    named = {
        role: [name for _, _, shown in rows for name in _NAME.findall(shown)]
        for role, rows in _sections().items()
    }
    missing = [
        f"{known.id} ({known.role})"
        for known in all_attacks()
        if not any(fnmatchcase(known.id, name) for name in named[known.role.lower()])
    ]
    assert missing == []
