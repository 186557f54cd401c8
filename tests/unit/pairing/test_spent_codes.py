"""Codes that a machine has tried: refused for the lifetime of an offer, also after a restart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.pairing import LIFETIME_S, PairingCode, new_code
from barnraise.pairing.spent_codes import MOST_SPENT, decode_spent, encode_spent, is_spent, with_spent

CODE = PairingCode(7, ("crossover", "clockwork", "zebra"))
OTHER = PairingCode(7, ("crossover", "clockwork", "anchor"))


def test_spent_code_is_refused_for_the_lifetime_of_an_offer() -> None:
    spent = with_spent((), CODE, 1000.0)
    assert is_spent(spent, CODE, 1000.0 + LIFETIME_S - 1)
    assert not is_spent(spent, CODE, 1000.0 + LIFETIME_S + 1)
    assert not is_spent(spent, OTHER, 1000.0)


def test_spent_code_stays_refused_if_the_clock_is_set_back() -> None:
    assert is_spent(with_spent((), CODE, 1000.0), CODE, 900.0)


def test_spent_codes_survive_encoding_and_do_not_show_the_words() -> None:
    spent = with_spent((), CODE, 1000.0)
    data = encode_spent(spent)
    assert decode_spent(data) == spent
    assert b"crossover" not in data


def test_spent_codes_are_bounded_and_forget_expired_ones() -> None:
    spent = with_spent((), CODE, 0.0)
    for _ in range(MOST_SPENT + 10):
        spent = with_spent(spent, new_code(), 2 * LIFETIME_S)
    assert len(spent) == MOST_SPENT
    assert all(tried.at == 2 * LIFETIME_S for tried in spent)


@pytest.mark.parametrize("data", [None, b"", b"\xff", b"\x91\x01"])
def test_decode_spent_of_missing_or_broken_data_is_empty(data: bytes | None) -> None:
    assert decode_spent(data) == ()


@given(st.binary(max_size=100))
def test_decode_spent_of_any_bytes_raises_nothing(data: bytes) -> None:
    decode_spent(data)
