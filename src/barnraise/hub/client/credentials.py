"""A machine's seat at a hub: the key it has there, and how a script's process comes to speak for it.

The key is made from the machine's own and the hub's name. So it is the same whenever this machine comes back,
nothing must be kept for that, two hubs cannot tell that it is the same machine, and the script that a hub
sends never holds the key that opens this machine's cluster. That is why all machines of a site, which may run
code on each other anyway, can share one.
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

VARIABLE = "BARNRAISE_HUB"  # in the script's environment: the path of its seat
SITE_VARIABLE = "BARNRAISE_SITE"  # on every machine of a site: the seat itself
_KEY_BYTES = 32
_UNREADABLE = "this machine's seat at the hub cannot be read"
_HINT = "Join again: `barnraise join --invite ...`."


class MemberCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """All that the process needs; removed when the machine leaves."""

    addresses: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=8)]
    hub: Annotated[bytes, Meta(min_length=32, max_length=32)]
    key: Annotated[bytes, Meta(min_length=_KEY_BYTES, max_length=_KEY_BYTES)]
    run: Name
    folder: Annotated[str, Meta(max_length=4096)] = ""  # for files on their way; of a site, each has its own
    store: Origin | None = None  # what was accepted beside the hub
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
    """Of this machine at this hub. Ed25519 signs the same message always alike, so it is always the same."""
    return hashlib.sha256(machine.sign(b"barnraise: this machine's key at the hub " + hub.raw)).digest()


def member_key(machine: NodeKey, hub: NodeId) -> NodeKey:
    return _key(member_secret(machine, hub))


def write_credentials(seat: MemberCredentials, path: Path) -> None:
    """Readable by its owner only; the path must be free."""
    load_or_create_private(path, _encoder.encode(seat))


def read_credentials(path: Path) -> MemberCredentials:
    try:
        return _decoded(path.read_bytes())
    except OSError as error:
        raise HubError(f"{_UNREADABLE}: {error}", hint=_HINT) from error


def credentials_text(seat: MemberCredentials) -> str:
    """For the environment of a site's workers."""
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
