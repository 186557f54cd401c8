"""Invites: one line of text with a hub's addresses, its key and a private key that admits a member.

The hub stores the public half, and how often it can still be used. A member proves with a signature that it
has the invite (`admission`). So a proxy, a mirror and the hub's own disk hold nothing that admits a machine.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
from collections.abc import Sequence
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import HubError, HubRefused, ProtocolError
from barnraise.hub.protocol.admission import ASK_FOR_INVITE, AdmissionStatement, admission_request
from barnraise.hub.protocol.messages import Addresses, JoinRequest, Moment, Name, NodeText, Role
from barnraise.identity.keys import NodeKey
from barnraise.identity.node_id import NodeId
from barnraise.transport.addresses import Where

PREFIX = "barnraise-invite:"
_MOST_TEXT = 8000
_SHORT = 9


class HubPlace(NamedTuple):
    """Addresses and key of a hub. ``pinned``: it ends TLS itself, so only its own key is accepted there.

    ``led_from``, ``root``: of a region that a hub named, the network of that hub, and the run's own hub.
    """

    addresses: tuple[str, ...]
    hub: NodeId
    pinned: bool
    led_from: Where | None = None
    root: NodeId | None = None


class Invite(msgspec.Struct, frozen=True, array_like=True):
    """Invite of one hub. The key is a secret, so it is not part of the representation."""

    addresses: Addresses  # best first
    hub: Annotated[bytes, Meta(min_length=32, max_length=32)]  # the public key itself
    key: Annotated[bytes, Meta(min_length=32, max_length=32)]  # private, of this invite alone
    role: Role
    run: Name
    expires: Moment
    pinned: bool

    @property
    def hub_id(self) -> NodeId:
        return NodeId(self.hub)

    @property
    def place(self) -> HubPlace:
        return HubPlace(self.addresses, self.hub_id, self.pinned)

    @property
    def signer(self) -> NodeKey:
        return NodeKey(Ed25519PrivateKey.from_private_bytes(self.key))

    def request(self, member: NodeId, name: str) -> JoinRequest:
        """Return the request with which this member joins."""
        signer = self.signer
        statement = AdmissionStatement(
            hub=self.hub,
            member=member.raw,
            invite=signer.id.raw,
            role=self.role,
            run=self.run,
            expires=self.expires,
        )
        return admission_request(signer, statement, name)

    def __repr__(self) -> str:
        return f"Invite({self.run}, {self.role})"


class InviteGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The hub's record of an invite."""

    key: NodeText  # the public half
    role: Role
    uses: Annotated[int, Meta(ge=0, le=1_000_000)]  # that are left
    expires: int
    used_by: tuple[NodeText, ...] = ()
    withdrawn: str = ""  # why


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Invite)


def make_invite(
    place: HubPlace, run: str, *, role: Role, uses: int, expires: int
) -> tuple[Invite, InviteGrant]:
    """Return a new invite and the hub's record of it."""
    check_addresses(place.addresses)
    private = Ed25519PrivateKey.generate()
    invite = Invite(
        place.addresses, place.hub.raw, private.private_bytes_raw(), role, run, expires, place.pinned
    )
    decode(_decoder, _encoder.encode(invite), "such an invite cannot be read again", hint=_ADDRESS_HINT)
    grant = InviteGrant(key=str(invite.signer.id), role=role, uses=uses, expires=expires)
    return invite, grant


def check_addresses(addresses: Sequence[str]) -> None:
    """Raise HubError for an address without TLS, except on the hub's own machine."""
    for address in addresses:
        if not address.startswith("https://") and not _is_local(address):
            raise HubError(
                f"the address {address} is without TLS, so others on the way could read along",
                hint=_ADDRESS_HINT,
            )


def _is_local(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return address.startswith("http://") and (
            host == "localhost" or ipaddress.ip_address(host).is_loopback
        )
    except ValueError:
        return False


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
        invite = decode(_decoder, data[3:], "the invite cannot be read")
    except ProtocolError as error:
        raise HubError(error.message, hint="Install the Barnraise version that made the invite.") from error
    check_addresses(invite.addresses)
    return invite


def short_key(key: str) -> str:
    """Return the beginning of an invite's public key, by which people name it."""
    return key[:_SHORT]


def use_grant(grant: InviteGrant, request: JoinRequest, node: str, clock: float) -> InviteGrant:
    """Return the grant after this node used it.

    Joining again costs no use. Raise HubRefused (403) with the reason.
    """
    if request.role != grant.role:
        raise HubRefused(403, "invite", f"the invite is for a {grant.role}", hint=ASK_FOR_INVITE)
    if node in grant.used_by:
        return grant
    if grant.withdrawn:
        message = f"the invite was withdrawn: {grant.withdrawn}"
        raise HubRefused(403, "invite-withdrawn", message, hint=ASK_FOR_INVITE)
    if clock > grant.expires:
        raise HubRefused(403, "invite-expired", "the invite has expired", hint=ASK_FOR_INVITE)
    if grant.uses < 1:
        raise HubRefused(
            403,
            "invite-used",
            f"the invite was used by {len(grant.used_by)} and cannot be used again",
            hint=ASK_FOR_INVITE,
        )
    return msgspec.structs.replace(grant, uses=grant.uses - 1, used_by=(*grant.used_by, node))


_COPY_AGAIN = f"Copy the whole line that begins with `{PREFIX}` again."
_ADDRESS_HINT = "Write the hub's address like https://hub.example.org or https://203.0.113.5:52480."
