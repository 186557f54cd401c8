"""Node id: typing errors are found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import IdentityError
from barnraise.identity import NodeId

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
raws = st.binary(min_size=32, max_size=32)


def test_printed_form_is_fixed() -> None:
    node = NodeId(bytes(range(32)))
    assert str(node) == "000G-40R4-0M30-E220-9185-GR38-E1WN-8124-GK2G-AHC5-RRR3-4D1P-70X3-RFG8"
    assert node.short == "000G-40R4"


@given(raws)
def test_node_id_prints_and_parses(raw: bytes) -> None:
    node = NodeId(raw)
    assert NodeId.parse(str(node)) == node
    assert len(str(node)) == 14 * 4 + 13


@given(raws)
def test_case_dashes_spaces_and_look_alikes_do_not_matter(raw: bytes) -> None:
    node = NodeId(raw)
    sloppy = str(node).lower().replace("-", " ").replace("0", "o").replace("1", "l")
    assert NodeId.parse(f"  {sloppy}\n") == node


@given(raws, st.integers(0, 55), st.sampled_from(ALPHABET))
def test_parse_finds_every_wrong_character(raw: bytes, place: int, letter: str) -> None:
    letters = str(NodeId(raw)).replace("-", "")
    if letters[place] == letter:
        return
    with pytest.raises(IdentityError, match=r"check character of part|does not end"):
        NodeId.parse(letters[:place] + letter + letters[place + 1 :])


@given(raws, st.integers(0, 3), st.integers(0, 13), st.integers(0, 13))
def test_parse_finds_every_swap_within_block(raw: bytes, part: int, first: int, second: int) -> None:
    letters = list(str(NodeId(raw)).replace("-", ""))
    index, other_index = part * 14 + first, part * 14 + second
    if letters[index] == letters[other_index]:
        return
    letters[index], letters[other_index] = letters[other_index], letters[index]
    with pytest.raises(IdentityError):
        NodeId.parse("".join(letters))


def test_parse_error_names_wrong_part() -> None:
    good = str(NodeId(bytes(32)))
    with pytest.raises(IdentityError, match="56 characters without its dashes, this has 55"):
        NodeId.parse(good[:-1])
    with pytest.raises(IdentityError, match="no character 'U'"):
        NodeId.parse("U" + good[1:])
    with pytest.raises(IdentityError, match=r"part 2 of 4.*characters 15 to 28"):
        NodeId.parse(good[:20] + "7" + good[21:])
    with pytest.raises(IdentityError, match="32 bytes"):
        NodeId(b"short")


@given(st.text(max_size=300))
def test_parse_of_any_text_gives_id_or_identity_error(text: str) -> None:
    try:
        NodeId.parse(text)
    except IdentityError:
        pass


@given(st.text(alphabet=ALPHABET, min_size=56, max_size=56))
def test_node_id_has_one_printed_form(text: str) -> None:
    try:
        node = NodeId.parse(text)
    except IdentityError:
        return
    assert str(node).replace("-", "") == text
