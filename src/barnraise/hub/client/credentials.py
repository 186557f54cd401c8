"""Credentials of a machine at a hub, and how the user's script gets them.

The member key is derived from the machine's key and the hub's id. So it is the same on every visit and need
not be stored. Two hubs cannot tell that it is the same machine. The hub's script never holds the key of this
machine's cluster. All machines of a site can share one member key, because they may run code on each other
anyway.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import HubError, ProtocolError
from barnraise.hub.protocol.messages import Address, Name, Origin
from barnraise.identity.keys import NodeKey
from barnraise.identity.node_id import NodeId
from barnraise.identity.private_file import load_or_create_private
from barnraise.transport.addresses import Where

VARIABLE = "BARNRAISE_HUB"  # in the script's environment: the path of its seat
SITE_VARIABLE = "BARNRAISE_SITE"  # on every machine of a site: the seat itself
_KEY_BYTES = 32
_UNREADABLE = "this machine's credentials for the hub cannot be read"
_HINT = "Join again: `barnraise join --invite ...`."


class MemberCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """All that a process needs to act as a member. The file is removed when the machine leaves."""

    addresses: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=8)]
    hub: Annotated[bytes, Meta(min_length=32, max_length=32)]
    key: Annotated[bytes, Meta(min_length=_KEY_BYTES, max_length=_KEY_BYTES)]
    run: Name
    pinned: bool = True  # the hub ends TLS itself
    led_from: Where | None = None  # the network of the hub that named a region
    root: Annotated[bytes, Meta(min_length=32, max_length=32)] | None = None  # the run's hub, at a region
    folder: Annotated[str, Meta(max_length=4096)] = ""  # for files on their way; of a site, each has its own
    store: Origin | None = None  # what was accepted beside the hub
    proxy_token: Annotated[str, Meta(max_length=200)] | None = None  # of a hub without TLS on this machine
    is_owner: bool = False
    only_begins: bool = False  # the owner's model becomes the first version, and nothing is trained here

    @property
    def hub_id(self) -> NodeId:
        return NodeId(self.hub)

    @property
    def member_key(self) -> NodeKey:
        return _key(self.key)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(MemberCredentials)


def member_secret(machine: NodeKey, hub: NodeId) -> bytes:
    """Return the secret of this machine at this hub.

    Ed25519 signatures are deterministic, so it never changes.
    """
    return hashlib.sha256(machine.sign(b"barnraise: this machine's key at the hub " + hub.raw)).digest()


def member_key(machine: NodeKey, hub: NodeId) -> NodeKey:
    return _key(member_secret(machine, hub))


def write_credentials(seat: MemberCredentials, path: Path) -> None:
    """Write the credentials to a new file that only the user can read."""
    load_or_create_private(path, _encoder.encode(seat))


def read_credentials(path: Path) -> MemberCredentials:
    try:
        return _decoded(path.read_bytes())
    except OSError as error:
        raise HubError(f"{_UNREADABLE}: {error}", hint=_HINT) from error


def credentials_text(seat: MemberCredentials) -> str:
    """Return the credentials as text, for the environment of a site's workers."""
    return base64.urlsafe_b64encode(_encoder.encode(seat)).decode()


def parse_credentials(text: str) -> MemberCredentials:
    try:
        return _decoded(base64.b64decode(text, altchars=b"-_", validate=True))
    except ValueError as error:
        raise HubError(f"{_UNREADABLE}: {error}", hint=_HINT) from error


def _decoded(data: bytes) -> MemberCredentials:
    try:
        return decode(_decoder, data, _UNREADABLE, hint=_HINT)
    except ProtocolError as error:
        raise HubError(f"{_UNREADABLE}: {error}", hint=_HINT) from error


def _key(secret: bytes) -> NodeKey:
    return NodeKey(Ed25519PrivateKey.from_private_bytes(secret))
