"""Invites: one line of text with a hub's addresses, its key and a token that admits a member.

The hub stores only the hash of the token, and how often it can still be used.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import HubError, HubRefused, ProtocolError
from barnraise.hub.protocol.messages import Address, Name, NodeText, Role
from barnraise.identity.node_id import NodeId

PREFIX = "barnraise-invite:"
_MOST_TEXT = 8000
_TOKEN_BYTES = 16


class Invite(msgspec.Struct, frozen=True, array_like=True):
    addresses: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=8)]  # best first
    hub: Annotated[bytes, Meta(min_length=32, max_length=32)]  # the public key itself
    token: Annotated[bytes, Meta(min_length=_TOKEN_BYTES, max_length=_TOKEN_BYTES)]
    run: Name
    expires: Annotated[int, Meta(ge=0, le=1 << 40)]  # seconds since 1970 by the hub's clock

    @property
    def hub_id(self) -> NodeId:
        return NodeId(self.hub)

    @property
    def token_text(self) -> str:
        """Return the token as a joining member sends it."""
        return base64.urlsafe_b64encode(self.token).decode().rstrip("=")


class InviteGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The hub's record of an invite."""

    token_hash: Annotated[str, Meta(min_length=64, max_length=64)]
    role: Role
    uses: Annotated[int, Meta(ge=0, le=1_000_000)]  # that are left
    expires: int
    used_by: tuple[NodeText, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Invite)


def make_invite(
    addresses: tuple[str, ...], hub: NodeId, run: str, *, role: Role, uses: int, expires: int
) -> tuple[Invite, InviteGrant]:
    """Return a new invite and the hub's record of it."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    invite = Invite(addresses, hub.raw, token, run, expires)
    decode(_decoder, _encoder.encode(invite), "such an invite cannot be read again", hint=_ADDRESS_HINT)
    grant = InviteGrant(token_hash=hash_token(invite.token_text), role=role, uses=uses, expires=expires)
    return invite, grant


def invite_text(invite: Invite) -> str:
    data = _encoder.encode(invite)
    check = hashlib.sha256(data).digest()[:3]
    return PREFIX + base64.urlsafe_b64encode(check + data).decode().rstrip("=")


def read_invite(text: str) -> Invite:
    """Parse an invite that a person pasted; white space is ignored. Raise HubError with what is wrong."""
    if len(text) > _MOST_TEXT:
        raise HubError("this is too long for an invite", hint=_COPY_AGAIN)
    words = "".join(text.split())
    start = words.find(PREFIX)
    if start < 0:
        raise HubError(f"this is not an invite: it has no `{PREFIX}`", hint=_COPY_AGAIN)
    body = words[start + len(PREFIX) :]
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except ValueError as error:
        raise HubError("the invite contains an invalid character", hint=_COPY_AGAIN) from error
    if hashlib.sha256(data[3:]).digest()[:3] != data[:3]:
        raise HubError("a part of the invite is missing or wrong", hint=_COPY_AGAIN)
    try:
        return decode(_decoder, data[3:], "the invite cannot be read")
    except ProtocolError as error:
        raise HubError(error.message, hint="Install the Barnraise version that made the invite.") from error


def hash_token(token: str) -> str:
    return hashlib.sha256(b"barnraise invite " + token.encode()).hexdigest()


def use_grant(grant: InviteGrant | None, node: str, clock: float) -> InviteGrant:
    """Return the grant after this node used it.

    Joining again costs no use. Raise HubRefused (403) with the reason.
    """
    if grant is None:
        raise HubRefused(403, "invite", "no invite of this hub has this token", hint=_ASK_FOR_ONE)
    if node in grant.used_by:
        return grant
    if clock > grant.expires:
        raise HubRefused(403, "invite-expired", "the invite has expired", hint=_ASK_FOR_ONE)
    if grant.uses < 1:
        raise HubRefused(
            403,
            "invite-used",
            f"the invite was used by {len(grant.used_by)} and cannot be used again",
            hint=_ASK_FOR_ONE,
        )
    return msgspec.structs.replace(grant, uses=grant.uses - 1, used_by=(*grant.used_by, node))


_COPY_AGAIN = f"Copy the whole line that begins with `{PREFIX}` again."
_ASK_FOR_ONE = "Ask the owner of the hub for a new invite: `barnraise invite`."
_ADDRESS_HINT = "Write the hub's address like https://hub.example.org, or http://203.0.113.5:52480."
