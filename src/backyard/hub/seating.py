"""A machine's seat at a hub: the key it has there, and the file that lets a script's process speak for it.

The key is made from the machine's own and the hub's name. So it is the same whenever this machine comes back,
nothing must be kept for that, two hubs cannot tell that it is the same machine, and the script that a hub
sends never holds the key that opens this machine's cluster.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from backyard.core.decoding import decode
from backyard.core.errors import HubError, ProtocolError
from backyard.hub.messages import Address, Name
from backyard.identity.keys import NodeKey
from backyard.identity.node_id import NodeId
from backyard.identity.private_file import load_or_create_private

VARIABLE = "BACKYARD_HUB"  # in the script's environment: the path of its seat
_KEY_BYTES = 32


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """All that the process needs; removed when the machine leaves."""

    addresses: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=8)]
    hub: Annotated[bytes, Meta(min_length=32, max_length=32)]
    key: Annotated[bytes, Meta(min_length=_KEY_BYTES, max_length=_KEY_BYTES)]
    run: Name
    folder: Annotated[str, Meta(max_length=4096)]  # for files on their way
    is_owner: bool = False
    only_begins: bool = False  # the owner's model becomes the first version, and nothing is trained here

    @property
    def hub_id(self) -> NodeId:
        return NodeId(self.hub)

    @property
    def member_key(self) -> NodeKey:
        return _key(self.key)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Seat)


def member_secret(machine: NodeKey, hub: NodeId) -> bytes:
    """Of this machine at this hub. Ed25519 signs the same message always alike, so it is always the same."""
    return hashlib.sha256(machine.sign(b"backyard: this machine's key at the hub " + hub.raw)).digest()


def member_key(machine: NodeKey, hub: NodeId) -> NodeKey:
    return _key(member_secret(machine, hub))


def write_seat(seat: Seat, path: Path) -> None:
    """Readable by its owner only; the path must be free."""
    load_or_create_private(path, _encoder.encode(seat))


def read_seat(path: Path) -> Seat:
    hint = "Join again: `backyard join --invite ...`."
    try:
        return decode(_decoder, path.read_bytes(), "this machine's seat at the hub cannot be read", hint=hint)
    except (OSError, ProtocolError) as error:
        raise HubError(f"this machine's seat at the hub cannot be read: {error}", hint=hint) from error


def _key(secret: bytes) -> NodeKey:
    return NodeKey(Ed25519PrivateKey.from_private_bytes(secret))
