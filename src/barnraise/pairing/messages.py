"""Messages of the pairing protocol: typed, bounded, and decoded strictly. Pure.

``PairingHello``, ``PairingAnswer`` and ``PairingUnable`` are sent in clear; the rest only encrypted (see
``channel``).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Annotated, TypeVar, overload

import msgspec
from msgspec import Meta

from barnraise.core.errors import PairingError, TrustError
from barnraise.core.sanitize import is_printable
from barnraise.identity.node_id import KEY_BYTES, NodeId
from barnraise.identity.trust import ENTRY_BYTES, HASH_BYTES, LOG_ENTRIES, NAME_LENGTH, Role, check_name

VERSIONS = (1,)
HELLO_BYTES = 1 << 10
PROOF_BYTES = 8 << 10
GRANT_BYTES = 2 << 20
DONE_BYTES = 256
SPAKE_BYTES = 33
MOST_ADDRESSES = 16
MOST_PEERS = 256
_SIGNATURE_BYTES = 64
LONGEST_TEXT = 200

_Version = Annotated[int, Meta(ge=1, le=0xFFFF)]
_Versions = Annotated[tuple[_Version, ...], Meta(min_length=1, max_length=16)]
_Spake = Annotated[bytes, Meta(min_length=SPAKE_BYTES, max_length=SPAKE_BYTES)]
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
_Signature = Annotated[bytes, Meta(min_length=_SIGNATURE_BYTES, max_length=_SIGNATURE_BYTES)]
_Name = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH)]
_Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
_Address = Annotated[str, Meta(min_length=2, max_length=45)]
_Addresses = Annotated[tuple[_Address, ...], Meta(max_length=MOST_ADDRESSES)]
_Port = Annotated[int, Meta(ge=1, le=0xFFFF)]
_Entry = Annotated[bytes, Meta(max_length=ENTRY_BYTES)]
_Log = Annotated[tuple[_Entry, ...], Meta(min_length=1, max_length=LOG_ENTRIES)]

NO_SIGNATURE = bytes(_SIGNATURE_BYTES)


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class PairingHello(_Message, frozen=True, tag="hello"):
    """First message, from the joiner: its versions and its half of SPAKE2."""

    versions: _Versions
    spake: _Spake


class PairingAnswer(_Message, frozen=True, tag="answer"):
    """Offerer's answer: the chosen version and its half of SPAKE2. It uses up the code."""

    version: _Version
    spake: _Spake


class PairingUnable(_Message, frozen=True, tag="unable"):
    """Offerer's answer without a common version. It does not use up the code."""

    versions: _Versions


class PairingProof(_Message, frozen=True, tag="proof"):
    """Joiner's node id, name, addresses, and its signature of the exchange."""

    node: _Key
    name: _Name
    platform: _Text
    addresses: _Addresses
    port: _Port
    signature: _Signature


class PairingPeer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Last known address of a machine of the cluster."""

    node: _Key
    addresses: _Addresses
    port: _Port

    @classmethod
    def of(cls, node: NodeId, addresses: Iterable[str], port: int) -> PairingPeer:
        return cls(node=node.raw, addresses=dialable(addresses), port=port)

    @property
    def id(self) -> NodeId:
        return NodeId(self.node)


_Peers = Annotated[tuple[PairingPeer, ...], Meta(max_length=MOST_PEERS)]


class PairingGrant(_Message, frozen=True, tag="grant"):
    """Offerer's node id, the granted role, the trust log, known addresses, and its signature."""

    node: _Key
    name: _Name
    role: Role
    log: _Log
    peers: _Peers
    signature: _Signature

    def __repr__(self) -> str:  # the log holds the discovery secrets
        return f"Grant({NodeId(self.node).short}, {self.role}, {len(self.log)} entries)"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("node", NodeId(self.node).short), ("role", self.role)]


class PairingRefusal(_Message, frozen=True, tag="refusal"):
    """Offerer's rejection instead of a grant, with a reason for people."""

    reason: _Text


class PairingDone(_Message, frozen=True, tag="done"):
    """Last message, from the joiner: it has verified and stored the log with this head."""

    head: _Hash


Message = (
    PairingHello | PairingAnswer | PairingUnable | PairingProof | PairingGrant | PairingRefusal | PairingDone
)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)
_One = TypeVar("_One", bound=_Message)
_Two = TypeVar("_Two", bound=_Message)


def encode(message: Message, limit: int) -> bytes:
    """Encode a message, and check that the other side would accept it."""
    data = _ENCODER.encode(message)
    decode(data, type(message), limit=limit)
    return data


@overload
def decode(data: bytes, expected: type[_One], *, limit: int) -> _One: ...


@overload
def decode(data: bytes, expected: type[_One], instead: type[_Two], *, limit: int) -> _One | _Two: ...


def decode(
    data: bytes, expected: type[_Message], instead: type[_Message] | None = None, *, limit: int
) -> _Message:
    """Decode a message of an expected kind; raise PairingError for anything else."""
    if len(data) > limit:
        raise PairingError(f"a pairing message has {len(data)} bytes, at most {limit} are allowed here")
    try:
        message = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # a deep nest of nothing
        raise PairingError("a pairing message cannot be read", hint=_VERSIONS_HINT) from error
    if not isinstance(message, (expected, instead or expected)):
        raise PairingError(f"a pairing message of the kind {type(message).__name__.lower()} came too early")
    _check_texts(message)
    return message


def _check_texts(message: object) -> None:
    if isinstance(message, PairingProof | PairingGrant):
        try:
            check_name(message.name)
        except TrustError as error:
            raise PairingError(error.message, hint=error.hint) from error
    if isinstance(message, PairingProof):
        _check_addresses(message.addresses)
        _check_printable(message.platform)
    elif isinstance(message, PairingGrant):
        for peer in message.peers:
            _check_addresses(peer.addresses)
    elif isinstance(message, PairingRefusal):
        _check_printable(message.reason)


def dialable(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses that another machine may dial, up to the limit."""
    return tuple(text for text in dict.fromkeys(addresses) if _is_dialable(text))[:MOST_ADDRESSES]


def _is_dialable(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    # A zone names an interface and means nothing elsewhere.
    return "%" not in text and not address.is_unspecified and not address.is_multicast


def _check_addresses(addresses: tuple[str, ...]) -> None:
    if not all(map(_is_dialable, addresses)):
        raise PairingError("a pairing message has an address that cannot be dialled")


def _check_printable(text: str) -> None:
    if not is_printable(text):
        raise PairingError("a pairing message has text that cannot be shown")


_VERSIONS_HINT = "Install the same Barnraise version on both machines; if they agree already, report this."
