"""Invites: people copy them, and each admits a limited number of members."""

from __future__ import annotations

import base64
import textwrap

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import BarnraiseError, HubError, HubRefused
from barnraise.hub.protocol.invites import (
    PREFIX,
    HubPlace,
    invite_text,
    make_invite,
    read_invite,
    use_grant,
)
from barnraise.identity import NodeKey

HUB = NodeKey.generate().id
PLACE = HubPlace(("https://hub.example.org", "http://127.0.0.1:52480"), HUB, pinned=True)
INVITE, GRANT = make_invite(PLACE, "fireside", role="friend", uses=2, expires=100)
ANN = NodeKey.generate().id


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


@pytest.mark.parametrize(
    "address",
    [
        "file:///etc/passwd",
        "http://192.168.1.5:52480",
        "http://hub.example.org",
        "http://127.0.0.1.example.org",
        "http://127.0.0.1@hub.example.org",
        "http://localhost.example.org",
    ],
)
def test_invite_with_address_without_tls_is_refused(address: str) -> None:
    """An observer on the way would read along; only the hub's own machine needs no TLS."""
    with pytest.raises(BarnraiseError):
        make_invite(PLACE._replace(addresses=(address,)), "fireside", role="friend", uses=1, expires=1)
    with pytest.raises(HubError):
        read_invite(invite_text(msgspec.structs.replace(INVITE, addresses=(address,))))


def test_invite_keeps_its_key_out_of_logs_and_the_hubs_record() -> None:
    secrets = (repr(INVITE.key)[2:-1], INVITE.key.hex(), base64.urlsafe_b64encode(INVITE.key).decode()[:40])
    for public in (repr(INVITE), repr(GRANT), repr(INVITE.request(ANN, "ann"))):
        assert not any(secret in public for secret in secrets)
    assert str(INVITE.signer.id) == GRANT.key


def test_invite_is_limited_to_its_uses() -> None:
    request = INVITE.request(ANN, "ann")
    grant = use_grant(GRANT, request, "a", 50)
    grant = use_grant(grant, request, "a", 50)
    assert grant.uses == 1, "joining again costs no use"
    grant = use_grant(grant, request, "b", 50)
    with pytest.raises(HubRefused, match="used by 2"):
        use_grant(grant, request, "c", 50)
    assert use_grant(grant, request, "a", 500) == grant, "a member may join again later"
    with pytest.raises(HubRefused, match="expired"):
        use_grant(GRANT, request, "a", 101)


def test_withdrawn_invite_admits_no_other_machine() -> None:
    request = INVITE.request(ANN, "ann")
    grant = msgspec.structs.replace(use_grant(GRANT, request, "a", 50), withdrawn="it was lost")
    assert use_grant(grant, request, "a", 50) == grant, "a member that came with it stays one"
    with pytest.raises(HubRefused, match="withdrawn: it was lost"):
        use_grant(grant, request, "b", 50)


def test_invite_of_another_role_is_refused() -> None:
    request = msgspec.structs.replace(INVITE.request(ANN, "ann"), role="owner")
    with pytest.raises(HubRefused, match="for a friend"):
        use_grant(GRANT, request, "a", 50)
