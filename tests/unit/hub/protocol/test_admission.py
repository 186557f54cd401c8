"""Proofs of admission: each admits one member to one hub, with one invite and role."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from barnraise.core.errors import HubRefused
from barnraise.hub.protocol.admission import check_proof, exact_key
from barnraise.hub.protocol.invites import HubPlace, make_invite
from barnraise.hub.protocol.messages import JoinRequest
from barnraise.identity import NodeKey

HUB, ANN, EVE = (NodeKey.generate().id for _ in range(3))
INVITE, _ = make_invite(
    HubPlace(("https://hub.test",), HUB, pinned=True), "fireside", role="friend", uses=2, expires=100
)
OWN = INVITE.signer.id
REQUEST = INVITE.request(ANN, "ann")


def test_proof_admits_its_member_to_its_hub() -> None:
    check_proof(REQUEST, OWN, ANN, HUB, "fireside")


@pytest.mark.parametrize(
    "request_",
    [
        replace(REQUEST, role="owner"),
        replace(REQUEST, expires=10**9),
        replace(REQUEST, invite=str(EVE)),
        replace(REQUEST, proof="A" * 86),
        INVITE.request(EVE, "ann"),
    ],
)
def test_proof_of_something_else_is_refused(request_: JoinRequest) -> None:
    """A proxy that has seen a request changes it, or uses another member's."""
    with pytest.raises(HubRefused) as refused:
        check_proof(request_, OWN, ANN, HUB, "fireside")
    assert (refused.value.status, refused.value.kind) == (403, "invite")


def test_proof_is_refused_for_other_members_hubs_runs_and_signers() -> None:
    for signer, member, hub, run in (
        (OWN, EVE, HUB, "fireside"),
        (OWN, ANN, EVE, "fireside"),
        (OWN, ANN, HUB, "other"),
        (HUB, ANN, HUB, "fireside"),
    ):
        with pytest.raises(HubRefused):
            check_proof(REQUEST, signer, member, hub, run)


def test_key_has_one_form() -> None:
    """Two forms of one invite's key would be two invites to the merge."""
    assert exact_key(str(ANN)) == ANN
    for text in (str(ANN).lower(), str(ANN).replace("-", ""), str(ANN)[:-1] + "?", "A" * 69):
        with pytest.raises(HubRefused):
            exact_key(text)
