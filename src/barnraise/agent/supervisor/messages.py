"""What an agent and a warden say to each other over the warden's standard input and output.

Each message is ``length u32 | msgpack``. Both ends are ours and on one machine; decoding is bounded anyway.
"""

from __future__ import annotations

import struct
from typing import Annotated, Protocol, TypeVar

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError

MARK_VARIABLE = "BARNRAISE_WARDEN"  # in the environment of all that a warden starts: how leftovers are known
MOST_TAIL_BYTES = 8 << 10
MOST_LOG_BYTES = 32 << 20
_MAX_LAUNCH_BYTES = 16 << 20
_MAX_EVENT_BYTES = 64 << 10
_LENGTH = struct.Struct("<I")

Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
Text = Annotated[str, Meta(max_length=1 << 17)]
Sentence = Annotated[str, Meta(max_length=4000)]
Tail = Annotated[bytes, Meta(max_length=MOST_TAIL_BYTES)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Count = Annotated[int, Meta(ge=1, le=4096)]


class WorkerLimits(msgspec.Struct, frozen=True):
    """How much of the machine the workers may take."""

    nice: Annotated[int, Meta(ge=0, le=19)] = 0
    memory_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 50)] | None = None  # of each worker
    cpus: Count | None = None  # of all workers together
    spare_cpus: Annotated[int, Meta(ge=0, le=4096)] = 0  # left to the person at the machine
    idle_io: bool = False


QUIET = WorkerLimits(nice=19, spare_cpus=1, idle_io=True)


class WorkerLaunch(msgspec.Struct, frozen=True):
    """One process to start. The environment is all of it: nothing is inherited."""

    rank: Rank
    local_rank: Rank
    command: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=4096)]
    directory: Text
    environment: Annotated[dict[Text, Text], Meta(max_length=4096)]
    log: Text


class LaunchRequest(msgspec.Struct, frozen=True):
    """The first message to a warden: all that it is there for."""

    run: Annotated[str, Meta(max_length=128)]
    generation: Annotated[int, Meta(ge=0, le=1 << 40)]
    workers: Annotated[tuple[WorkerLaunch, ...], Meta(min_length=1, max_length=1024)]
    records: Text  # the directory of the files that tell a later agent what was running
    limits: WorkerLimits = WorkerLimits()
    grace_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    log_bytes: Annotated[int, Meta(ge=1 << 12, le=1 << 40)] = MOST_LOG_BYTES  # of each worker


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End all workers: asked and then killed, or killed now. With ``ranks``: these alone, now."""

    hard: bool = False
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=1024)] = ()


class WorkerStarted(msgspec.Struct, frozen=True, tag="started"):
    rank: Rank
    pid: Annotated[int, Meta(ge=1, lt=1 << 32)]


class WorkerExited(msgspec.Struct, frozen=True, tag="ended"):
    """A worker's end; with neither code nor signal it never ran, or nobody saw how it ended."""

    rank: Rank
    code: Annotated[int, Meta(ge=-(1 << 32), le=1 << 32)] | None
    signal: Annotated[int, Meta(ge=1, le=256)] | None
    at: Seconds  # monotonic
    tail: Tail
    out_of_memory: bool | None = None  # None: it cannot be known


class SupervisorNote(msgspec.Struct, frozen=True, tag="note"):
    """Something the user should read."""

    text: Sentence


class AllExited(msgspec.Struct, frozen=True, tag="all-ended"):
    """Nothing that descends from the warden is left; it ends now."""


Event = WorkerStarted | WorkerExited | SupervisorNote | AllExited
_Message = TypeVar("_Message")

_launch_decoder = msgspec.msgpack.Decoder(LaunchRequest)
_stop_decoder = msgspec.msgpack.Decoder(Stop)
_event_decoder = msgspec.msgpack.Decoder(Event)


class ByteReader(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


def encode_frame(message: LaunchRequest | Stop | Event) -> bytes:
    """ProtocolError if the other end would not take so much."""
    body = msgspec.msgpack.encode(message)
    most = _MAX_LAUNCH_BYTES if isinstance(message, LaunchRequest) else _MAX_EVENT_BYTES
    if len(body) > most:
        raise ProtocolError(f"a message of {len(body)} bytes to or from a warden; at most {most} are allowed")
    return _LENGTH.pack(len(body)) + body


def read_launch(stream: ByteReader) -> LaunchRequest | None:
    """None if the agent is gone before it said what to do."""
    body = _read_body(stream, _MAX_LAUNCH_BYTES)
    return None if body is None else _decoded(_launch_decoder, body)


def read_stop(stream: ByteReader) -> Stop | None:
    body = _read_body(stream, _MAX_EVENT_BYTES)
    return None if body is None else _decoded(_stop_decoder, body)


def read_event(stream: ByteReader) -> Event | None:
    body = _read_body(stream, _MAX_EVENT_BYTES)
    return None if body is None else _decoded(_event_decoder, body)


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], body: bytes) -> _Message:
    return decode(decoder, body, "a message to or from a warden cannot be read")


def _read_body(stream: ByteReader, most: int) -> bytes | None:
    head = _read_exactly(stream, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > most:
        raise ProtocolError(f"a message of {length} bytes to or from a warden; at most {most} are allowed")
    return _read_exactly(stream, length)


def _read_exactly(stream: ByteReader, size: int) -> bytes | None:
    """None if the stream ends before."""
    got = bytearray()
    while len(got) < size:
        part = stream.read(min(size - len(got), 1 << 20))
        if not part:
            return None
        got += part
    return bytes(got)
