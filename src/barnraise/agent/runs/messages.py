"""What agents tell each other about runs, besides the files. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.agent import protocol
from barnraise.runs.checkpoint_manifest import KEPT, HeldCheckpoint, Step
from barnraise.runs.record import Digest, NodeReport, RunId, RunRecord, Version, Words

MOST_LOG_BYTES = 256 << 10
MOST_RUNS = 17  # one, and those that it goes on with

Serial = Annotated[int, Meta(ge=0, le=2**53)]
Offset = Annotated[int, Meta(ge=0, le=2**62)]
Rank = Annotated[int, Meta(ge=0, le=1024)]


class RecordUpdate(msgspec.Struct, frozen=True, array_like=True, tag="record"):
    """A version of a run's record; the newest counts."""

    record: RunRecord


class ReportUpdate(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """The sender's own part in a run."""

    report: NodeReport


class LogRequest(msgspec.Struct, frozen=True, array_like=True, tag="log?"):
    """What did this worker of yours say, from this byte on?"""

    serial: Serial
    run: RunId
    start: Version
    local_rank: Rank
    offset: Offset
    most: Annotated[int, Meta(ge=1, le=MOST_LOG_BYTES)]


class LogResponse(msgspec.Struct, frozen=True, array_like=True, tag="log"):
    """``start`` is later than what was asked for if older bytes were dropped; ``end``: written so far."""

    serial: Serial
    start: Offset
    data: Annotated[bytes, Meta(max_length=MOST_LOG_BYTES)]
    end: Offset


class HeldCheckpointsRequest(msgspec.Struct, frozen=True, array_like=True, tag="held?"):
    """Which checkpoints of these runs do you have? ``files``: do you have what the first was started with?"""

    serial: Serial
    runs: Annotated[tuple[RunId, ...], Meta(min_length=1, max_length=MOST_RUNS)]
    files: bool = False


class HeldCheckpointsResponse(msgspec.Struct, frozen=True, array_like=True, tag="held"):
    serial: Serial
    held: Annotated[tuple[HeldCheckpoint, ...], Meta(max_length=MOST_RUNS * 2 * KEPT)]
    files: bool = False
    sharded: Step = 0  # the newest step of these runs of which it has a part


class FilesRequest(msgspec.Struct, frozen=True, array_like=True, tag="files?"):
    """Let me fetch this checkpoint from you; with step 0: what the run was started with."""

    serial: Serial
    run: RunId
    step: Step


class FilesResponse(msgspec.Struct, frozen=True, array_like=True, tag="files"):
    """The list of them, to be fetched now; if it is empty, ``words`` say why."""

    serial: Serial
    manifest: Digest
    words: Words = ""


class CopyOffer(msgspec.Struct, frozen=True, array_like=True, tag="copy?"):
    """Keep a copy of this checkpoint of mine: too few machines do."""

    serial: Serial
    run: RunId
    step: Step


class CopyResult(msgspec.Struct, frozen=True, array_like=True, tag="copy"):
    """I have it now, unless ``words`` say why not."""

    serial: Serial
    words: Words = ""


CheckpointRequest = HeldCheckpointsRequest | FilesRequest | CopyOffer
CheckpointAnswer = HeldCheckpointsResponse | FilesResponse | CopyResult
RunMessage = RecordUpdate | ReportUpdate | LogRequest | LogResponse | CheckpointRequest | CheckpointAnswer

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RunMessage] = msgspec.msgpack.Decoder(RunMessage)


def encode(message: RunMessage) -> bytes:
    return protocol.RUN + _encoder.encode(message)


def decode(data: bytes | memoryview) -> RunMessage:
    return protocol.decode(_decoder, data)
