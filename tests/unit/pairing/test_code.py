"""Pairing codes: a typing error is found before it costs the only guess."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import PairingError
from barnraise.pairing import PairingCode, new_code, offer_tag, parse_code
from barnraise.pairing.code import NUMBERS, WORD_COUNT
from barnraise.pairing.words import PREFIX_LETTERS, WORDS

words = st.sampled_from(WORDS)
codes = st.builds(PairingCode, st.sampled_from(NUMBERS), st.tuples(words, words, words))


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
    """No word is the beginning of another, so any number of joined words can be read in one way only."""
    assert [pair for pair in itertools.permutations(WORDS, 2) if pair[0].startswith(pair[1])] == []


def test_words_of_a_code_are_24_bits() -> None:
    """An attacker with one guess at a code for owners has one chance in 16,777,216."""
    assert len(WORDS) ** WORD_COUNT == 1 << 24
    assert len(new_code().words) == WORD_COUNT


def test_new_code_uses_whole_list_and_given_number() -> None:
    made = [new_code() for _ in range(2000)]
    for place in range(WORD_COUNT):
        assert len({code.words[place] for code in made}) > 240
    assert {code.number for code in made} <= set(NUMBERS)
    assert len({code.number for code in made}) > 80
    assert new_code(7).number == 7
    for number in (0, 100, -1):
        with pytest.raises(PairingError):
            new_code(number)


def test_offer_tags_differ_by_number_and_are_fixed() -> None:
    assert len({offer_tag(number) for number in NUMBERS}) == len(NUMBERS)
    assert offer_tag(7).hex() == "98997e2d16e36297f863243a14cc7078"
    assert PairingCode(7, ("crossover", "clockwork", "zebra")).tag == offer_tag(7)


@settings(deadline=None)
@given(codes)
def test_code_prints_and_parses(code: PairingCode) -> None:
    assert parse_code(str(code)) == code


@settings(deadline=None)
@given(codes, st.sampled_from(["-", " ", "  ", "_", "–", "—", "\u00a0", ".", "/", " - "]), st.booleans())
def test_parse_code_ignores_case_blanks_and_dashes(code: PairingCode, gap: str, shout: bool) -> None:
    text = f"  {gap.join((str(code.number), *code.words))}\n"
    assert parse_code(text.upper() if shout else text.title()) == code


@settings(deadline=None)
@given(codes)
def test_parse_code_accepts_missing_dashes(code: PairingCode) -> None:
    first, *rest = code.words
    assert parse_code(f"{code.number}{''.join(code.words)}") == code
    assert parse_code(f"{' '.join(code.words)} {code.number}") == code
    assert parse_code(f"{code.number}-{first}-{''.join(rest)}") == code


@settings(deadline=None)
@given(codes, st.lists(st.integers(PREFIX_LETTERS, 10), min_size=3, max_size=3))
def test_parse_code_accepts_start_of_word(code: PairingCode, lengths: list[int]) -> None:
    begun = [word[:length] for word, length in zip(code.words, lengths, strict=True)]
    assert parse_code("-".join((str(code.number), *begun))) == code


def test_parse_code_accepts_words_torn_apart() -> None:
    assert str(parse_code("7 cross over clock work ze bra")) == "7-crossover-clockwork-zebra"
    assert str(parse_code("７-Crossover-Clockwork-ZEBRA")) == "7-crossover-clockwork-zebra"


@settings(deadline=None)
@given(codes, st.data())
def test_parse_code_with_typing_error_suggests_word(code: PairingCode, data: st.DataObject) -> None:
    first, *rest = code.words
    place = data.draw(st.integers(0, len(first) - 1))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz"))
    typed = first[:place] + letter + first[place + 1 :]
    if typed == first:
        return
    with pytest.raises(PairingError, match="is not a word of a pairing code") as caught:
        parse_code("-".join((str(code.number), typed, *rest)))
    assert "Did you mean" in caught.value.hint
    assert first in caught.value.hint
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
        ("7", "three words, this has 0"),
        ("7-crossover", "three words, this has 1"),
        ("7-crossover-clockwork", "three words, this has 2"),
        ("7-crossover-clockwork-zebra-anchor", "three words, this has 4"),
        ("7-qqqqqq-clockwork-zebra", "'qqqqqq' is not a word"),
        ("7-qqqqqqqqqqqqqqq", "cannot be told apart"),
        ("7-crossover-zebra-" + "z" * 100, r"'z{20}\.\.\.' is not a word"),
        ("7" * 201, "too long"),
    ],
)
def test_parse_code_error_names_problem(text: str, problem: str) -> None:
    with pytest.raises(PairingError, match=problem) as caught:
        parse_code(text)
    assert "7-crossover-clockwork" in caught.value.hint


def test_parse_code_with_ambiguous_start_names_candidates() -> None:
    with pytest.raises(PairingError, match="'cro' is not a word") as caught:
        parse_code("7-cro-clockwork-zebra")
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
    assert repr(PairingCode(7, ("crossover", "clockwork", "zebra"))) == "Code(7)"
