"""Names that a person shortens or mistypes, and the names that they lead to."""

from __future__ import annotations

import pytest

from barnraise.core.names import NamedItem, list_names, match_name, similar_names, skeleton

MACHINES = [
    NamedItem("mac", 1, ("AAAA", "AAAA-1111")),
    NamedItem("pc-kitchen", 2, ("BBBB", "BBBB-2222")),
    NamedItem("pc-office", 3, ("CCCC", "CCCC-3333")),
]


@pytest.mark.parametrize(
    ("typed", "value"),
    [("mac", 1), ("MAC ", 1), ("m", 1), ("pc-o", 3), ("bbbb", 2), ("CCCC-3333", 3), ("pc-kitchen", 2)],
)
def test_whole_name_id_and_only_beginning_are_found(typed: str, value: int) -> None:
    assert match_name(typed, MACHINES, kind="machine").value == value


def test_whole_name_wins_over_longer_names() -> None:
    items = [NamedItem("pc-2", 1), NamedItem("pc", 2), NamedItem("pc-3", 3)]
    assert match_name("pc", items, kind="machine").value == 2


def test_shared_beginning_is_rejected_with_all_names() -> None:
    match = match_name("pc", MACHINES, kind="machine")
    assert match.value is None
    assert match.problem == "more than one machine starts with 'pc': pc-kitchen, pc-office"
    assert match.hint == "Type more of the name."


def test_mistyped_name_gets_a_suggestion_and_all_names() -> None:
    match = match_name("mca", MACHINES, kind="machine")
    assert match.value is None
    assert match.problem == "no machine is called 'mca'"
    assert match.hint == "Did you mean mac? There are: mac, pc-kitchen, pc-office."


def test_beginning_of_an_id_is_not_found() -> None:
    assert match_name("bb", MACHINES, kind="machine").value is None


@pytest.mark.parametrize("typed", ["", "  "])
def test_empty_name_finds_nothing(typed: str) -> None:
    assert match_name(typed, MACHINES[:1], kind="machine").value is None


def test_exact_search_rejects_the_beginning_of_a_name() -> None:
    match = match_name("m", MACHINES, kind="machine", exact=True)
    assert match.value is None
    assert match.hint == "This cannot be undone, so it needs the whole name: mac."
    assert match_name("mac", MACHINES, kind="machine", exact=True).value == 1


def test_two_machines_with_one_name_are_told_apart_by_id_only() -> None:
    items = [*MACHINES, NamedItem("Mac", 4, ("DDDD",))]
    match = match_name("mac", items, kind="machine")
    assert match.value is None
    assert match.hint == "Type an id instead: AAAA, DDDD."
    assert match_name("dddd", items, kind="machine").value == 4


def test_name_that_is_the_id_of_another_machine_finds_neither() -> None:
    assert match_name("aaaa", [*MACHINES, NamedItem("aaaa", 4)], kind="machine").value is None


def test_many_names_are_listed_in_part() -> None:
    assert list_names([f"run-{number}" for number in range(10)]).startswith("run-2, ")
    assert list_names([f"run-{number}" for number in range(10)]).endswith("run-9 and 2 more")


def test_no_names_at_all_are_said() -> None:
    assert match_name("x", [], kind="run").hint == "There is no run yet."


def test_similar_names_resemble_the_text() -> None:
    assert similar_names("pcc", ["mac", "pc", "nas"]) == "pc"
    assert similar_names("xyzzy", ["mac", "pc", "nas"]) == ""


@pytest.mark.parametrize("name", ["PC", "рс", "ＰＣ", "pс"])
def test_skeleton_is_equal_for_names_that_look_alike(name: str) -> None:
    """In capitals, in Cyrillic, in wide letters, and with one letter of another script."""
    assert skeleton(name) == skeleton("pc")


def test_skeleton_differs_for_other_names() -> None:
    assert len({skeleton(name) for name in ("mac", "nas", "pc", "pc2", "größe", "日本")}) == 6
