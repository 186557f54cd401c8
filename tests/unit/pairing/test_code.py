"""Pairing codes: a typing error is found before it costs the only guess."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import PairingError
from barnraise.pairing import PairingCode, new_code, offer_tag, parse_code
from barnraise.pairing.code import NUMBERS
from barnraise.pairing.words import PREFIX_LETTERS, WORDS

words = st.sampled_from(WORDS)
codes = st.builds(PairingCode, st.sampled_from(NUMBERS), words, words)


def _distance(first: str, second: str) -> int:
    """Return the number of letters to change, add or remove."""
    row = list(range(len(second) + 1))
    for place, letter in enumerate(first, 1):
        above, row[0] = row[0], place
        for column, twin in enumerate(second, 1):
            above, row[column] = (
                row[column],
                min(row[column] + 1, row[column - 1] + 1, above + (letter != twin)),
            )
    return row[-1]


def test_words_differ_by_four_letters() -> None:
    assert len(WORDS) == len(set(WORDS)) == 256
    assert list(WORDS) == sorted(WORDS)
    assert all(re.fullmatch(r"[a-z]{5,10}", word) for word in WORDS)
    assert len({word[:PREFIX_LETTERS] for word in WORDS}) == 256
    near = [pair for pair in itertools.combinations(WORDS, 2) if _distance(*pair) < 4]
    assert near == []


def test_edit_distance_of_tests_is_right() -> None:
    assert [_distance("kitten", word) for word in ("kitten", "sitting", "", "kiten")] == [0, 3, 6, 1]


def test_joined_words_parse_in_one_way() -> None:
    assert len({first + second for first in WORDS for second in WORDS}) == 256 * 256


def test_new_code_uses_whole_list_and_given_number() -> None:
    made = [new_code() for _ in range(2000)]
    assert len({code.first for code in made}) > 240
    assert len({code.second for code in made}) > 240
    assert {code.number for code in made} <= set(NUMBERS)
    assert len({code.number for code in made}) > 80
    assert new_code(7).number == 7
    for number in (0, 100, -1):
        with pytest.raises(PairingError):
            new_code(number)


def test_offer_tags_differ_by_number_and_are_fixed() -> None:
    assert len({offer_tag(number) for number in NUMBERS}) == len(NUMBERS)
    assert offer_tag(7).hex() == "98997e2d16e36297f863243a14cc7078"
    assert PairingCode(7, "crossover", "clockwork").tag == offer_tag(7)


@settings(deadline=None)
@given(codes)
def test_code_prints_and_parses(code: PairingCode) -> None:
    assert parse_code(str(code)) == code


@settings(deadline=None)
@given(codes, st.sampled_from(["-", " ", "  ", "_", "–", "—", "\u00a0", ".", "/", " - "]), st.booleans())
def test_parse_code_ignores_case_blanks_and_dashes(code: PairingCode, gap: str, shout: bool) -> None:
    text = f"  {code.number}{gap}{code.first}{gap}{code.second}\n"
    assert parse_code(text.upper() if shout else text.title()) == code


@settings(deadline=None)
@given(codes)
def test_parse_code_accepts_missing_dashes(code: PairingCode) -> None:
    assert parse_code(f"{code.number}{code.first}{code.second}") == code
    assert parse_code(f"{code.first} {code.second} {code.number}") == code


@settings(deadline=None)
@given(codes, st.integers(PREFIX_LETTERS, 10), st.integers(PREFIX_LETTERS, 10))
def test_parse_code_accepts_start_of_word(code: PairingCode, first: int, second: int) -> None:
    assert parse_code(f"{code.number}-{code.first[:first]}-{code.second[:second]}") == code


def test_parse_code_accepts_words_torn_apart() -> None:
    assert str(parse_code("7 cross over clock work")) == "7-crossover-clockwork"
    assert str(parse_code("７-Crossover-Clockwork")) == "7-crossover-clockwork"


@settings(deadline=None)
@given(codes, st.data())
def test_parse_code_with_typing_error_suggests_word(code: PairingCode, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(code.first) - 1))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz"))
    typed = code.first[:place] + letter + code.first[place + 1 :]
    if typed == code.first:
        return
    with pytest.raises(PairingError, match="is not a word of a pairing code") as caught:
        parse_code(f"{code.number}-{typed}-{code.second}")
    assert "Did you mean" in caught.value.hint
    assert code.first in caught.value.hint
    assert "nothing was sent" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "one number from 1 to 99, this has none"),
        ("crossover-clockwork", "this has none"),
        ("0-crossover-clockwork", "this has 0"),
        ("100-crossover-clockwork", "this has 100"),
        ("7-8-crossover-clockwork", "this has 7, 8"),
        ("9" * 100 + "-crossover-clockwork", "this has 99999999\n"),
        ("7", "two words, this has 0"),
        ("7-crossover", "two words, this has 1"),
        ("7-crossover-clockwork-zebra", "two words, this has 3"),
        ("7-qqqqqq-clockwork", "'qqqqqq' is not a word"),
        ("7-qqqqqqqqqqqqqqq", "cannot be told apart"),
        ("7-crossover-" + "z" * 100, r"'z{20}\.\.\.' is not a word"),
        ("7" * 201, "too long"),
    ],
)
def test_parse_code_error_names_problem(text: str, problem: str) -> None:
    with pytest.raises(PairingError, match=problem) as caught:
        parse_code(text)
    assert "7-crossover-clockwork" in caught.value.hint


def test_parse_code_with_ambiguous_start_names_candidates() -> None:
    with pytest.raises(PairingError, match="'cro' is not a word") as caught:
        parse_code("7-cro-clockwork")
    assert "Did you mean crocodile or crossover?" in caught.value.hint


@settings(deadline=None)
@given(st.text(max_size=210))
def test_parse_code_of_any_text_gives_code_or_pairing_error(text: str) -> None:
    try:
        code = parse_code(text)
    except PairingError:
        return
    assert parse_code(str(code)) == code


@settings(deadline=None)
@given(st.text(alphabet="crosveklw- 7", max_size=30))
def test_parse_code_of_similar_text_gives_code_or_pairing_error(text: str) -> None:
    try:
        parse_code(text)
    except PairingError:
        pass


def test_code_repr_hides_words() -> None:
    assert repr(PairingCode(7, "crossover", "clockwork")) == "Code(7)"
