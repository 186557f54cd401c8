"""Invites: people copy them, and each admits a limited number of members."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import BarnraiseError, HubError, HubRefused
from barnraise.hub.protocol.invites import (
    PREFIX,
    hash_token,
    invite_text,
    make_invite,
    read_invite,
    use_grant,
)
from barnraise.identity import NodeKey

HUB = NodeKey.generate().id
INVITE, GRANT = make_invite(
    ("https://hub.example.org", "http://192.0.2.7:52480"), HUB, "fireside", role="friend", uses=2, expires=100
)


def test_invite_survives_chat_programs() -> None:
    text = invite_text(INVITE)
    assert "\n" not in text
    for form in (text, f"  Join us: \n{textwrap.fill(text, 40)}\n", text.replace(PREFIX, PREFIX + " ")):
        assert read_invite(form) == INVITE
    assert INVITE.hub_id == HUB


@given(st.integers(0, len(invite_text(INVITE)) - 1), st.sampled_from("aZ09-_=! "))
def test_invite_with_wrong_character_is_refused(place: int, letter: str) -> None:
    text = invite_text(INVITE)
    changed = text[:place] + letter + text[place + 1 :]
    if "".join(changed.split()) == text:
        return
    try:
        invite = read_invite(changed)
    except HubError:
        return
    assert invite == INVITE, "base64 has spare bits at its end"


@given(st.text(max_size=300))
def test_invite_from_any_text_is_refused_with_reason(text: str) -> None:
    for form in (text, PREFIX + text):
        with pytest.raises(HubError):
            read_invite(form)


def test_invite_with_invalid_address_is_refused() -> None:
    with pytest.raises(BarnraiseError):
        make_invite(("file:///etc/passwd",), HUB, "fireside", role="friend", uses=1, expires=1)


def test_invite_is_limited_to_its_uses() -> None:
    assert hash_token(INVITE.token_text) == GRANT.token_hash
    grant = use_grant(GRANT, "a", 50)
    grant = use_grant(grant, "a", 50)
    assert grant.uses == 1, "joining again costs no use"
    grant = use_grant(grant, "b", 50)
    with pytest.raises(HubRefused, match="used by 2"):
        use_grant(grant, "c", 50)
    assert use_grant(grant, "a", 500) == grant, "a member may join again later"
    with pytest.raises(HubRefused, match="expired"):
        use_grant(GRANT, "a", 101)
    with pytest.raises(HubRefused, match="no invite"):
        use_grant(None, "a", 1)
