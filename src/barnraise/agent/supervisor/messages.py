"""Messages between an agent and a supervisor, over the supervisor's standard input and output.

Each message is ``length u32 | msgpack``. Both ends are trusted and on one machine; decoding is bounded
anyway.
"""

from __future__ import annotations

import struct
from typing import Annotated, Protocol, TypeVar

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError

MARK_VARIABLE = "BARNRAISE_SUPERVISOR"  # marks all processes that a supervisor starts
MAX_TAIL_BYTES = 8 << 10
MAX_LOG_BYTES = 32 << 20
_MAX_LAUNCH_BYTES = 16 << 20
_MAX_EVENT_BYTES = 64 << 10
_LENGTH = struct.Struct("<I")

Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
Text = Annotated[str, Meta(max_length=1 << 17)]
Sentence = Annotated[str, Meta(max_length=4000)]
Tail = Annotated[bytes, Meta(max_length=MAX_TAIL_BYTES)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Count = Annotated[int, Meta(ge=1, le=4096)]


class WorkerLimits(msgspec.Struct, frozen=True):
    """Limits on the resources that the workers may use."""

    nice: Annotated[int, Meta(ge=0, le=19)] = 0
    memory_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 50)] | None = None  # of each worker
    cpus: Count | None = None  # of all workers together
    spare_cpus: Annotated[int, Meta(ge=0, le=4096)] = 0  # left to the user of the machine
    idle_io: bool = False


QUIET = WorkerLimits(nice=19, spare_cpus=1, idle_io=True)


class WorkerLaunch(msgspec.Struct, frozen=True):
    """One process to start; ``environment`` is complete, nothing is inherited."""

    rank: Rank
    local_rank: Rank
    command: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=4096)]
    directory: Text
    environment: Annotated[dict[Text, Text], Meta(max_length=4096)]
    log: Text


class LaunchRequest(msgspec.Struct, frozen=True):
    """The first message to a supervisor: the workers to start, and their limits."""

    run: Annotated[str, Meta(max_length=128)]
    generation: Annotated[int, Meta(ge=0, le=1 << 40)]
    workers: Annotated[tuple[WorkerLaunch, ...], Meta(min_length=1, max_length=1024)]
    records: Text  # the directory of pid files
    limits: WorkerLimits = WorkerLimits()
    grace_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    log_bytes: Annotated[int, Meta(ge=1 << 12, le=1 << 40)] = MAX_LOG_BYTES  # of each worker


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Request to terminate all workers; ``hard``: kill them now. With ``ranks``: kill only these."""

    hard: bool = False
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=1024)] = ()


class WorkerStarted(msgspec.Struct, frozen=True, tag="started"):
    """A worker process has started."""

    rank: Rank
    pid: Annotated[int, Meta(ge=1, lt=1 << 32)]


class WorkerExited(msgspec.Struct, frozen=True, tag="ended"):
    """A worker has exited; without code and signal it never ran, or its end was not observed."""

    rank: Rank
    code: Annotated[int, Meta(ge=-(1 << 32), le=1 << 32)] | None
    signal: Annotated[int, Meta(ge=1, le=256)] | None
    at: Seconds  # monotonic
    tail: Tail
    out_of_memory: bool | None = None  # None: unknown


class SupervisorNote(msgspec.Struct, frozen=True, tag="note"):
    """A message for the user."""

    text: Sentence


class AllExited(msgspec.Struct, frozen=True, tag="all-ended"):
    """No descendant of the supervisor is left; the supervisor exits now."""


Event = WorkerStarted | WorkerExited | SupervisorNote | AllExited
_Message = TypeVar("_Message")

_launch_decoder = msgspec.msgpack.Decoder(LaunchRequest)
_stop_decoder = msgspec.msgpack.Decoder(Stop)
_event_decoder = msgspec.msgpack.Decoder(Event)


class ByteReader(Protocol):
    """A stream that can be read in blocks."""

    def read(self, size: int, /) -> bytes | None:
        """Read up to ``size`` bytes."""


def encode_frame(message: LaunchRequest | Stop | Event) -> bytes:
    """Encode a message with its length; raise ProtocolError if it is too long."""
    body = msgspec.msgpack.encode(message)
    limit = _MAX_LAUNCH_BYTES if isinstance(message, LaunchRequest) else _MAX_EVENT_BYTES
    if len(body) > limit:
        raise ProtocolError(
            f"a supervisor message of {len(body)} bytes is too long; at most {limit} are allowed"
        )
    return _LENGTH.pack(len(body)) + body


def read_launch(stream: ByteReader) -> LaunchRequest | None:
    """Read the launch request; return None if the agent closed the pipe before."""
    body = _read_body(stream, _MAX_LAUNCH_BYTES)
    return None if body is None else _decoded(_launch_decoder, body)


def read_stop(stream: ByteReader) -> Stop | None:
    """Read a stop request; return None at the end of the pipe."""
    body = _read_body(stream, _MAX_EVENT_BYTES)
    return None if body is None else _decoded(_stop_decoder, body)


def read_event(stream: ByteReader) -> Event | None:
    """Read an event; return None at the end of the pipe."""
    body = _read_body(stream, _MAX_EVENT_BYTES)
    return None if body is None else _decoded(_event_decoder, body)


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], body: bytes) -> _Message:
    return decode(decoder, body, "cannot decode a message of a supervisor")


def _read_body(stream: ByteReader, limit: int) -> bytes | None:
    head = _read_exactly(stream, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > limit:
        raise ProtocolError(
            f"a supervisor message of {length} bytes is too long; at most {limit} are allowed"
        )
    return _read_exactly(stream, length)


def _read_exactly(stream: ByteReader, size: int) -> bytes | None:
    """Read ``size`` bytes; return None if the stream ends before."""
    received = bytearray()
    while len(received) < size:
        part = stream.read(min(size - len(received), 1 << 20))
        if not part:
            return None
        received += part
    return bytes(received)
