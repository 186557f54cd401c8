"""Messages between agents about jobs. Pure."""

from __future__ import annotations

import msgspec

from barnraise.agent import protocol
from barnraise.runs.queue.job import JobRecord


class JobUpdate(msgspec.Struct, frozen=True, array_like=True, tag="job"):
    """A version of a job's record; the newest wins."""

    record: JobRecord


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(JobUpdate)


def encode(message: JobUpdate) -> bytes:
    """Encode a message with its kind byte."""
    return protocol.QUEUE + _encoder.encode(message)


def decode(data: bytes | memoryview) -> JobUpdate:
    """Decode a message; raise ProtocolError if it is invalid."""
    return protocol.decode(_decoder, data)
