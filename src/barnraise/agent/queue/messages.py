"""Messages between agents about jobs. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.agent import protocol
from barnraise.agent_client.queue.requests import JobNumber
from barnraise.runs.queue.disk_quorum import DIGEST_BYTES
from barnraise.runs.queue.job import JobRecord

MAX_HELD = 8192
ManifestId = Annotated[bytes, Meta(min_length=32, max_length=32)]
Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]


class JobUpdate(msgspec.Struct, frozen=True, array_like=True, tag="job"):
    """A version of a job's record; the newest wins."""

    record: JobRecord


class JobsHeld(msgspec.Struct, frozen=True, array_like=True, tag="held"):
    """Jobs on the disk of the sender, with the hashes of their records; an empty hash: it has no such job.

    ``asks``: the receiver shall say which records of these jobs it has. ``is_all``: these are all jobs of the
    sender.
    """

    jobs: Annotated[tuple[tuple[JobNumber, Digest], ...], Meta(max_length=MAX_HELD)]
    asks: bool = False
    is_all: bool = False


class FilesHeld(msgspec.Struct, frozen=True, array_like=True, tag="files"):
    """Manifests of jobs that have not ended, and whose files are all on the disk of the sender."""

    manifests: Annotated[tuple[ManifestId, ...], Meta(max_length=MAX_HELD)]


QueueMessage = JobUpdate | JobsHeld | FilesHeld

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[QueueMessage] = msgspec.msgpack.Decoder(QueueMessage)


def encode(message: QueueMessage) -> bytes:
    """Encode a message with its kind byte."""
    return protocol.QUEUE + _encoder.encode(message)


def decode(data: bytes | memoryview) -> QueueMessage:
    """Decode a message; raise ProtocolError if it is invalid."""
    return protocol.decode(_decoder, data)
