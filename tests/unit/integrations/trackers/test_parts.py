"""Names of parts and of values."""

from __future__ import annotations

import pytest

from barnraise.integrations.trackers.parts import current_part, part_name, restricted_name


def test_last_part_counts() -> None:
    assert [part_name("train", number) for number in (1, 2, 3)] == ["train", "train.2", "train.3"]
    assert current_part(lambda number: number < 3) == 3


@pytest.mark.parametrize("name", ["loss", "val/loss", "a b", "é_1"])
def test_allowed_name_stays(name: str) -> None:
    assert restricted_name(name, r"\w\-. /") == name


def test_names_with_other_characters_stay_apart() -> None:
    names = {restricted_name(name, r"\w") for name in ("a@b", "a#b", "a_b", "@", "#")}
    assert len(names) == 5
    assert all(name.replace("_", "").isalnum() for name in names - {"a_b"})
