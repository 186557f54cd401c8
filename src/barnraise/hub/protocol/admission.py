"""Proof of admission: how a new member shows that an invite, or the hub above, admits it.

The proof is a signature over the hub, the member, the invite, its role, its run and its expiry. An invite's
private key signs it at the member itself, so it never reaches the network. A hub that sends a member to a
region signs it with its own key. Any proxy may read a proof: it admits one member's key to one hub.
"""

from __future__ import annotations

import base64
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.errors import HubRefused, IdentityError
from barnraise.hub.protocol.messages import JoinRequest, Name, Role
from barnraise.identity.keys import NodeKey, verify_signature
from barnraise.identity.node_id import NodeId

_CONTEXT = b"barnraise admission 1\n"
_Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
_encoder = msgspec.msgpack.Encoder()


class AdmissionStatement(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Statement that a hub may admit this member. It has one byte form."""

    hub: _Key
    member: _Key
    invite: _Key  # the public half: members that came with the same invite belong together
    role: Role
    run: Name
    expires: int  # seconds since 1970 by the signer's clock


def sign_admission(signer: NodeKey, statement: AdmissionStatement) -> str:
    """Return the proof as text."""
    signature = signer.sign(_CONTEXT + _encoder.encode(statement))
    return base64.urlsafe_b64encode(signature).decode().rstrip("=")


def admission_request(signer: NodeKey, statement: AdmissionStatement, name: str) -> JoinRequest:
    """Return the request to join that this statement proves. ``name``: of the member."""
    return JoinRequest(
        invite=str(NodeId(statement.invite)),
        role=statement.role,
        expires=statement.expires,
        proof=sign_admission(signer, statement),
        name=name,
    )


def check_proof(request: JoinRequest, signer: NodeId, member: NodeId, hub: NodeId, run: str) -> None:
    """Raise HubRefused (403) unless the signer's key admits this member to this hub."""
    statement = AdmissionStatement(
        hub=hub.raw,
        member=member.raw,
        invite=exact_key(request.invite).raw,
        role=request.role,
        run=run,
        expires=request.expires,
    )
    proof = base64.b64decode(request.proof + "==", altchars=b"-_")
    if not verify_signature(signer, proof, _CONTEXT + _encoder.encode(statement)):
        raise HubRefused(
            403, "invite", "the invite did not sign this request of this machine", hint=ASK_FOR_INVITE
        )


def exact_key(text: str) -> NodeId:
    """Parse a public key in the one form that the log has. Raise HubRefused (403) for any other."""
    try:
        key = NodeId.parse(text)
    except IdentityError as error:
        raise HubRefused(403, "invite", f"this is not a key: {error}", hint=ASK_FOR_INVITE) from error
    if str(key) != text:
        raise HubRefused(403, "invite", "the key is written in another form", hint=ASK_FOR_INVITE)
    return key


ASK_FOR_INVITE = "Ask the owner of the hub for a new invite: `barnraise invite`."
