"""Pre-shared keys: random, exact, and protected against changes by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import PairingError
from barnraise.pairing import Psk, new_psk, parse_psk, psk_preface_key, psk_tag
from barnraise.pairing.psk import PSK_BYTES

keys = st.builds(Psk, st.sampled_from(["owner", "guest"]), st.binary(min_size=32, max_size=32))
FIXED = Psk("guest", bytes(range(32)))
LINE = "barnraise-psk-1 guest 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f 7b1d731a"


def test_psk_text_form_is_fixed() -> None:
    assert str(FIXED) == LINE
    assert psk_tag(FIXED).hex() == "b4e434d8c02fc513d70f6e29c0a4384c"
    assert psk_preface_key(FIXED).hex() == "bc26549a1fabe41c9c70f3060108255e21be706af9345a1a202b372ca270f586"


def test_new_psk_is_random() -> None:
    made = {new_psk("owner").key for _ in range(50)}
    assert len(made) == 50
    assert {len(key) for key in made} == {PSK_BYTES}


@settings(deadline=None)
@given(keys)
def test_psk_prints_and_parses(psk: Psk) -> None:
    assert parse_psk(f"{psk}\n") == psk
    assert parse_psk(f"  {psk}\r\n") == psk


@settings(deadline=None)
@given(keys, st.data())
def test_parse_psk_finds_changed_character(psk: Psk, data: st.DataObject) -> None:
    text = str(psk)
    place = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.characters(codec="utf-8"))
    changed = text[:place] + letter + text[place + 1 :]
    if changed.strip() == text:
        return
    with pytest.raises(PairingError):
        parse_psk(changed)


def test_parse_psk_rejects_role_changed_by_hand() -> None:
    with pytest.raises(PairingError, match="checksum at the end"):
        parse_psk(str(FIXED).replace("guest", "owner"))


def test_parse_psk_rejects_chosen_passwords() -> None:
    hexadecimal = FIXED.key.hex()
    for text in (
        "",
        "hunter2",
        hexadecimal,
        f"barnraise-psk-1 owner {hexadecimal}",
        str(FIXED).upper(),
        str(FIXED).replace("-1 ", "-2 "),
        str(FIXED).replace("guest", "admin"),
        str(FIXED).replace(" ", "  "),
        f"{FIXED}\n{FIXED}",
        str(FIXED) + "0",
        " " * 400 + str(FIXED),
    ):
        with pytest.raises(PairingError) as caught:
            parse_psk(text)
        assert "barnraise psk new" in caught.value.hint
    with pytest.raises(PairingError):
        Psk("owner", b"short")


@settings(deadline=None)
@given(st.text(max_size=420))
def test_parse_psk_of_any_text_gives_key_or_pairing_error(text: str) -> None:
    with pytest.raises(PairingError):
        parse_psk(text)


def test_derived_values_differ_by_key_and_role() -> None:
    others = [FIXED, Psk("owner", FIXED.key), Psk("guest", bytes(32))]
    derived = [psk_tag(psk) for psk in others]
    derived += [psk_preface_key(psk)[:16] for psk in others] + [psk.password[:16] for psk in others]
    derived += [psk.key[:16] for psk in others[1:]]
    assert len(set(derived)) == len(derived)
    assert len(psk_preface_key(FIXED)) == 32
    assert len(psk_tag(FIXED)) == 16


def test_psk_repr_hides_key() -> None:
    assert repr(FIXED) == "Psk(guest)"
