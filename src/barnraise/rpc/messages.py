"""Messages between two workers, and their bytes.

A message is a typed head and a body. The body has the values of a call or of a result
(``worker.launch.serializer``). A packet is a first frame of fixed size and, for longer messages, the rest::

    0   head    u32   bytes of the head
    4   body    u64   bytes of the body
    12  head, body, and zeros up to the size of a frame
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError, RunError
from barnraise.core.units import format_size
from barnraise.rpc.registry import MAX_NAME

FRAME_BYTES: Final = 4096
MAX_HEAD: Final = 256 << 10
MAX_BODY: Final = 1 << 30
MAX_ARGUMENTS: Final = 128
MAX_TIMEOUT_S: Final = 7 * 86400.0
MAX_TEXT: Final = 4000
_SIZES = struct.Struct("<IQ")

Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
Place = Annotated[int, Meta(ge=0, lt=MAX_ARGUMENTS)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]


class ReferenceId(msgspec.Struct, frozen=True, array_like=True):
    """An object: the rank that owns it, and its number there."""

    owner: Rank
    serial: Number


class CallMessage(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A call of a registered function; its body has the arguments that are no references.

    Arguments are ``positions`` positional ones, then those with ``names``. ``references``: the places of
    references among them. ``keeps``: the result stays with the callee. ``timeout_s``: what the caller waits.
    """

    call: Number
    function: Name
    positions: Annotated[int, Meta(ge=0, le=MAX_ARGUMENTS)]
    names: Annotated[tuple[Name, ...], Meta(max_length=MAX_ARGUMENTS)] = ()
    references: Annotated[tuple[tuple[Place, ReferenceId], ...], Meta(max_length=MAX_ARGUMENTS)] = ()
    keeps: bool = False
    timeout_s: Annotated[float, Meta(ge=0, le=MAX_TIMEOUT_S)] = 0.0


class FetchMessage(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """A question for the value of an object of the receiver."""

    call: Number
    serial: Number


class LeaseMessage(msgspec.Struct, frozen=True, array_like=True, tag="lease"):
    """A question for one more lease, for a rank to which the sender hands its reference on."""

    call: Number
    serial: Number
    holder: Rank


class ReleaseMessage(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """Release of one lease of a rank."""

    serial: Number
    holder: Rank


class ResultMessage(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """Result of a question: the value in the body, or a reference."""

    call: Number
    reference: ReferenceId | None = None


class ErrorMessage(msgspec.Struct, frozen=True, array_like=True, tag="error"):
    """Error of a question: the type of the exception and its text."""

    call: Number
    kind: Annotated[str, Meta(max_length=MAX_NAME)]
    text: Annotated[str, Meta(max_length=MAX_TEXT)]


class GoodbyeMessage(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """The script of the sender makes no more calls."""


Message = (
    CallMessage
    | FetchMessage
    | LeaseMessage
    | ReleaseMessage
    | ResultMessage
    | ErrorMessage
    | GoodbyeMessage
)

_messages = msgspec.msgpack.Decoder(Message)


class PacketSizes(NamedTuple):
    """Sizes of the parts of a packet, in bytes."""

    head: int
    body: int

    @property
    def total(self) -> int:
        """Return the bytes of the whole packet."""
        return max(FRAME_BYTES, _SIZES.size + self.head + self.body)

    def split(self, packet: memoryview) -> tuple[memoryview, memoryview]:
        """Return head and body of a whole packet."""
        start = _SIZES.size + self.head
        return packet[_SIZES.size : start], packet[start : start + self.body]


def encode_packet(message: Message, contents: Sequence[bytes | memoryview] = ()) -> bytearray:
    """Return the bytes of a message. Raise RunError if it is larger than a receiver accepts."""
    head = msgspec.msgpack.encode(message)
    body = sum(map(len, contents))
    if body > MAX_BODY:
        raise RunError(
            f"the values of a remote call have {format_size(body)}; "
            f"the limit is {format_size(MAX_BODY)}",
            hint="Send them in several calls, or leave them where they are: rpc.remote.",
        )
    packet = bytearray().join([_SIZES.pack(len(head), body), head, *contents])
    packet.extend(bytes(max(0, FRAME_BYTES - len(packet))))
    return packet


def read_sizes(frame: bytes | memoryview) -> PacketSizes:
    """Return the sizes that the first frame of a packet names. Raise ProtocolError if they are too large."""
    if len(frame) != FRAME_BYTES:
        raise ProtocolError(f"the first frame of a remote call has {len(frame)} bytes, not {FRAME_BYTES}")
    head, body = _SIZES.unpack_from(frame)
    if head > MAX_HEAD or body > MAX_BODY:
        raise ProtocolError(f"a remote call with a head of {head} and a body of {body} bytes is too large")
    return PacketSizes(head, body)


def decode_message(head: bytes | memoryview) -> Message:
    """Return the message of a head. Raise ProtocolError if it is none."""
    message: Message = decode(_messages, head, "a message of a remote call cannot be read")
    return message
