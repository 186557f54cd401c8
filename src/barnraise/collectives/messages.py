"""Messages between a worker and its communication process, and the operation spec that ranks compare.

The channel carries ``length u32 | msgpack``. Both ends run on one machine and belong to us; decoding is
typed anyway.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.ops.dtypes import by_code
from barnraise.core.errors import UnsupportedOperation


class OperationSpec(msgspec.Struct, frozen=True, array_like=True):
    """Specification of an operation. Every rank of the group must start it with equal fields."""

    kind: str
    dtype: int
    reduction: str
    root: int
    algorithm: str
    sizes: tuple[int, ...]
    segment: int
    arity: int
    sites: tuple[tuple[int, ...], ...] = ()

    def describe(self) -> str:
        """Describe the operation in words. The spec may come from a peer and hold any values."""
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
        return f"{' '.join(parts)} by {self.algorithm}"


class GroupMember(msgspec.Struct, frozen=True, array_like=True):
    """Network address of a rank of a group. It is only a hint: the link proves the identity."""

    worker: bytes
    port: int
    addresses: tuple[str, ...]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Reason why a group or an operation failed; ``peer`` and ``late`` are ranks of the group."""

    code: str
    message: str
    peer: int = -1
    late: tuple[int, ...] = ()


# worker to communication process


class OpenGroup(msgspec.Struct, frozen=True, tag="open"):
    request: int
    generation: int
    name: str
    rank: int
    members: tuple[GroupMember, ...]
    timeout_s: float
    table: CostTable | None


class CloseGroup(msgspec.Struct, frozen=True, tag="close"):
    group: int


class AbortGroup(msgspec.Struct, frozen=True, tag="abort"):
    group: int
    why: str


class CancelOperation(msgspec.Struct, frozen=True, tag="cancel"):
    """Command to time an operation out now, because its caller does not wait any longer."""

    operation: int
    group: int


class MapSegment(msgspec.Struct, frozen=True, tag="map"):
    """Shared segment to map.

    On POSIX its descriptor is sent beside the message, on Windows ``name`` identifies it.
    """

    segment: int
    size: int
    name: str


class UnmapSegment(msgspec.Struct, frozen=True, tag="unmap"):
    segment: int


class StartOperation(msgspec.Struct, frozen=True, tag="start"):
    """Command to start a collective on ``size`` bytes at ``offset`` of a shared segment."""

    operation: int
    group: int
    sequence: int
    specification: OperationSpec
    segment: int
    offset: int
    size: int
    timeout_s: float
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    direct: bool = False  # reply on the direct channel, where the caller waits


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
    """Command to receive a message; ``peer`` -1 accepts any sender.

    ``fails_alone``: without a message at its timeout, this operation fails and the group continues.
    """

    operation: int
    group: int
    peer: int
    tag: int
    dtype: int
    segment: int
    offset: int
    size: int
    timeout_s: float
    fails_alone: bool = False


class AskStatistics(msgspec.Struct, frozen=True, tag="ask"):
    request: int


Command = (
    OpenGroup
    | CloseGroup
    | AbortGroup
    | CancelOperation
    | MapSegment
    | UnmapSegment
    | StartOperation
    | SendTo
    | ReceiveFrom
    | AskStatistics
)

# communication process to worker


class CommProcessReady(msgspec.Struct, frozen=True, tag="ready"):
    """First reply: the communication process is registered and reachable as this member."""

    member: GroupMember
    run: str
    generation: int
    encryption: str


class StartRefused(msgspec.Struct, frozen=True, tag="refused"):
    """First reply if the communication process cannot start, with the reason."""

    failure: Failure


class GroupOpened(msgspec.Struct, frozen=True, tag="opened"):
    request: int
    group: int
    table: CostTable
    links: tuple[str, ...]
    nodes: tuple[
        bytes, ...
    ] = ()  # nodes of the other ranks in order, proved by their links; b"" in plaintext


class GroupNotOpened(msgspec.Struct, frozen=True, tag="not-opened"):
    request: int
    failure: Failure


class OperationFinished(msgspec.Struct, frozen=True, tag="finished"):
    """Reply for a finished operation; ``at_ns``: monotonic time when the last byte was in shared memory."""

    operation: int
    at_ns: int
    peer: int = -1


class OperationFailed(msgspec.Struct, frozen=True, tag="failed"):
    operation: int
    failure: Failure


class WaitingFor(msgspec.Struct, frozen=True, tag="waiting"):
    """Report that an operation has made no progress for a while, and which ranks it waits for."""

    operation: int
    seconds: float
    message: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    pass


class Statistics(msgspec.Struct, frozen=True, tag="statistics"):
    request: int
    values: dict[str, float]
    links: tuple[str, ...]


Reply = (
    CommProcessReady
    | StartRefused
    | GroupOpened
    | GroupNotOpened
    | OperationFinished
    | OperationFailed
    | WaitingFor
    | Alive
    | Statistics
)

MAX_MESSAGE: Final = 4 << 20
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_reply_decoder = msgspec.msgpack.Decoder(Reply)
_specification_decoder = msgspec.msgpack.Decoder(OperationSpec)


def encode(message: Command | Reply) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def encode_specification(specification: OperationSpec) -> bytes:
    return _encoder.encode(specification)


def decode_specification(data: bytes) -> OperationSpec:
    """Decode a peer's specification. Raise ``msgspec.DecodeError`` if it is malformed."""
    return _specification_decoder.decode(data)


class Inbox:
    """Splits the bytes of the channel into messages."""

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
                raise ValueError(f"a message of {length} bytes is too long for the channel")
            if len(self._buffer) - start - 4 < length:
                break
            messages.append(self._decode(self._buffer[start + 4 : start + 4 + length]))
            start += 4 + length
        del self._buffer[:start]
        return messages
