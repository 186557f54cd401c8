"""Names that every machine can hold, and that people read as what they are."""

from __future__ import annotations

import pytest

from barnraise.artifacts.packing.portable_names import name_problems, why_unusable


@pytest.mark.parametrize("sign", ["\x7f", "\x85", "\x9b", "\u202e", "\u2066", "\u200f", "\u2028"])
def test_name_with_mark_of_direction_or_c1_is_rejected(sign: str) -> None:
    """A shown list of files must not name ``gpj.py`` and mean ``yp.jpg`` read backwards."""
    assert "look like another name" in (why_unusable(f"data/photo{sign}gpj.py") or "")


def test_names_of_any_script_are_usable() -> None:
    assert name_problems(["größe.py", "日本/データ.csv", "👩\u200d🔬.png", "a b.txt"]) == []
