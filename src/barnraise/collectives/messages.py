"""What a worker and its mover say to each other over their private channel, and what ranks compare.

The channel carries ``length u32 | msgpack``. Both ends are ours and on one machine; decoding is typed anyway.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from barnraise.collectives.costs import CostTable
from barnraise.collectives.dtypes import by_code
from barnraise.core.errors import UnsupportedOperation


class Specification(msgspec.Struct, frozen=True, array_like=True):
    """What an operation is. Every rank of the group must start it with equal fields."""

    kind: str
    dtype: int
    reduction: str
    root: int
    strategy: str
    sizes: tuple[int, ...]
    segment: int
    arity: int
    sites: tuple[tuple[int, ...], ...] = ()

    def describe(self) -> str:
        """In words. It may be a peer's, and hold anything."""
        more = "..." if len(self.sizes) > 4 else ""
        sizes = ("+".join(str(size) for size in self.sizes[:4]) or "0") + more
        try:
            element = by_code(self.dtype).name
        except UnsupportedOperation:
            element = "of an unknown type"
        parts = [f"{self.kind} of {sizes} bytes", element]
        if self.reduction:
            parts.append(self.reduction)
        if self.root >= 0:
            parts.append(f"root {self.root}")
        return f"{' '.join(parts)} by {self.strategy}"


class Member(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank of a group can be reached. A hint: identity is proved on the link."""

    worker: bytes
    port: int
    addresses: tuple[str, ...]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a group or an operation ended; ``peer`` and ``late`` are ranks of the group."""

    code: str
    message: str
    peer: int = -1
    late: tuple[int, ...] = ()


# worker to mover


class OpenGroup(msgspec.Struct, frozen=True, tag="open"):
    request: int
    generation: int
    name: str
    rank: int
    members: tuple[Member, ...]
    timeout_s: float
    table: CostTable | None


class CloseGroup(msgspec.Struct, frozen=True, tag="close"):
    group: int


class AbortGroup(msgspec.Struct, frozen=True, tag="abort"):
    group: int
    why: str


class MapSegment(msgspec.Struct, frozen=True, tag="map"):
    """A shared segment; on POSIX its descriptor travels with the message, on Windows ``name`` finds it."""

    segment: int
    size: int
    name: str


class UnmapSegment(msgspec.Struct, frozen=True, tag="unmap"):
    segment: int


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Begin a collective on ``size`` bytes at ``offset`` of a shared segment."""

    operation: int
    group: int
    sequence: int
    specification: Specification
    segment: int
    offset: int
    size: int
    timeout_s: float
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    direct: bool = False  # reply on the direct channel: the caller waits there


class SendTo(msgspec.Struct, frozen=True, tag="send"):
    operation: int
    group: int
    peer: int
    tag: int
    dtype: int
    segment: int
    offset: int
    size: int
    timeout_s: float


class ReceiveFrom(msgspec.Struct, frozen=True, tag="receive"):
    """``peer`` -1 takes from anyone."""

    operation: int
    group: int
    peer: int
    tag: int
    dtype: int
    segment: int
    offset: int
    size: int
    timeout_s: float


class AskStatistics(msgspec.Struct, frozen=True, tag="ask"):
    request: int


Command = (
    OpenGroup
    | CloseGroup
    | AbortGroup
    | MapSegment
    | UnmapSegment
    | Start
    | SendTo
    | ReceiveFrom
    | AskStatistics
)

# mover to worker


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The mover is registered and reachable as this member."""

    member: Member
    run: str
    generation: int
    encryption: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The mover cannot serve at all."""

    failure: Failure


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    request: int
    group: int
    table: CostTable
    links: tuple[str, ...]
    nodes: tuple[bytes, ...] = ()  # of the other ranks in order, as their links proved; b"" in plaintext


class NotOpened(msgspec.Struct, frozen=True, tag="not-opened"):
    request: int
    failure: Failure


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """``at_ns``: the monotonic time at which the last byte was in shared memory."""

    operation: int
    at_ns: int
    peer: int = -1


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    operation: int
    failure: Failure


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """An operation has made no progress for a while: for whom it waits."""

    operation: int
    seconds: float
    message: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    pass


class Statistics(msgspec.Struct, frozen=True, tag="statistics"):
    request: int
    values: dict[str, float]
    links: tuple[str, ...]


Reply = Ready | Refused | Opened | NotOpened | Finished | Failed | Waiting | Alive | Statistics

MAX_MESSAGE: Final = 4 << 20
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_reply_decoder = msgspec.msgpack.Decoder(Reply)
_specification_decoder = msgspec.msgpack.Decoder(Specification)


def encode(message: Command | Reply) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def encode_specification(specification: Specification) -> bytes:
    return _encoder.encode(specification)


def decode_specification(data: bytes) -> Specification:
    """May raise ValueError and RecursionError: the bytes are a peer's."""
    return _specification_decoder.decode(data)


class Inbox:
    """Cuts the channel's bytes into messages."""

    def __init__(self, *, commands: bool) -> None:
        self._decode = _command_decoder.decode if commands else _reply_decoder.decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Command | Reply]:
        self._buffer += data
        messages: list[Command | Reply] = []
        start = 0
        while len(self._buffer) - start >= 4:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_MESSAGE:
                raise ValueError(f"a message of {length} bytes on the mover's channel")
            if len(self._buffer) - start - 4 < length:
                break
            messages.append(self._decode(self._buffer[start + 4 : start + 4 + length]))
            start += 4 + length
        del self._buffer[:start]
        return messages
