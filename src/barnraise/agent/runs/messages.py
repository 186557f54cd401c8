"""Messages between agents about runs, except for files. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.agent import protocol
from barnraise.agent_client.run_options import Digest
from barnraise.history.log_file import MAX_PART
from barnraise.history.logs.copy_plan import MAX_LOG, HeldLog
from barnraise.history.logs.retention import MOST_REMOVALS, RemovedRecord
from barnraise.runs.checkpoint_manifest import KEPT, MOST_PARTS, HeldCheckpoint, PartNumber, Step
from barnraise.runs.record import Node, NodeReport, RunId, RunRecord, Version, Words
from barnraise.runs.variables import VariableValues

MAX_LOG_BYTES = 256 << 10
MOST_HELD_LOGS = 512
MAX_RUNS = 17  # one run, and the earlier runs that it resumes

Serial = Annotated[int, Meta(ge=0, le=2**53)]
Offset = Annotated[int, Meta(ge=0, le=2**62)]
Rank = Annotated[int, Meta(ge=0, le=1024)]
Parts = Annotated[tuple[PartNumber, ...], Meta(max_length=MOST_PARTS)]


class RecordUpdate(msgspec.Struct, frozen=True, array_like=True, tag="record"):
    """A version of a run's record; the newest wins."""

    record: RunRecord


class ReportUpdate(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """The status report of the sender's machine in a run."""

    report: NodeReport


class LogRequest(msgspec.Struct, frozen=True, array_like=True, tag="log?"):
    """Request for a worker's output from a byte offset on."""

    serial: Serial
    run: RunId
    start: Version
    local_rank: Rank
    offset: Offset
    max_bytes: Annotated[int, Meta(ge=1, le=MAX_LOG_BYTES)]


class LogResponse(msgspec.Struct, frozen=True, array_like=True, tag="log"):
    """Output of a worker; ``end``: bytes written so far.

    ``start`` is later than the requested offset if older bytes were dropped.
    """

    serial: Serial
    start: Offset
    data: Annotated[bytes, Meta(max_length=MAX_LOG_BYTES)]
    end: Offset


class ValuesRequest(msgspec.Struct, frozen=True, array_like=True, tag="values?"):
    """Request of a machine of a run for the values of its variables."""

    run: RunId


class ValuesResponse(msgspec.Struct, frozen=True, array_like=True, tag="values"):
    """The values of a run's variables; None if the sender has none for the receiver."""

    run: RunId
    values: VariableValues | None = None


class HeldCheckpointsRequest(msgspec.Struct, frozen=True, array_like=True, tag="held?"):
    """Request for the checkpoints that a machine holds of these runs.

    ``files``: also ask whether it has the files of the first run.
    """

    serial: Serial
    runs: Annotated[tuple[RunId, ...], Meta(min_length=1, max_length=MAX_RUNS)]
    files: bool = False


class HeldCheckpointsResponse(msgspec.Struct, frozen=True, array_like=True, tag="held"):
    """The checkpoints that the sender holds."""

    serial: Serial
    held: Annotated[tuple[HeldCheckpoint, ...], Meta(max_length=MAX_RUNS * 2 * KEPT)]
    files: bool = False
    sharded: Step = 0  # the newest step of these runs of which it has a part


class FilesRequest(msgspec.Struct, frozen=True, array_like=True, tag="files?"):
    """Request for read access to a checkpoint; step 0: to the files of the run.

    ``parts``: those that are wanted of a checkpoint in parts.
    """

    serial: Serial
    run: RunId
    step: Step
    parts: Parts = ()


class FilesResponse(msgspec.Struct, frozen=True, array_like=True, tag="files"):
    """The manifest to fetch; if it is empty, ``words`` say why."""

    serial: Serial
    manifest: Digest
    words: Words = ""


class CopyOffer(msgspec.Struct, frozen=True, array_like=True, tag="copy?"):
    """Offer of a checkpoint, or of some of its parts, that too few machines hold."""

    serial: Serial
    run: RunId
    step: Step
    parts: Parts = ()


class CopyResult(msgspec.Struct, frozen=True, array_like=True, tag="copy"):
    """Result of an offer: copied, unless ``words`` say why not."""

    serial: Serial
    words: Words = ""


class HeldLogsRequest(msgspec.Struct, frozen=True, array_like=True, tag="logs?"):
    """Request for the logs of records that a machine holds; those that changed in the last ``recent_s``.

    ``recent_s`` 0: all. ``removals``: digest of the removed records that the asker knows.
    """

    serial: Serial
    recent_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    page: Annotated[int, Meta(ge=0, le=1024)] = 0
    removals: Annotated[bytes, Meta(max_length=16)] = b""


class HeldLogsResponse(msgspec.Struct, frozen=True, array_like=True, tag="logs"):
    """Logs that the sender holds, and with the first page removed records if it knows of others."""

    serial: Serial
    logs: Annotated[tuple[HeldLog, ...], Meta(max_length=MOST_HELD_LOGS)]
    has_more: bool = False
    removals: Annotated[tuple[RemovedRecord, ...], Meta(max_length=MOST_REMOVALS)] = ()


class LogPartRequest(msgspec.Struct, frozen=True, array_like=True, tag="part?"):
    """Request for a part of a machine's log of a run; ``identity``: of the file that the asker copies."""

    serial: Serial
    run: RunId
    node: Node
    identity: Annotated[bytes, Meta(max_length=16)]
    offset: Annotated[int, Meta(ge=0, le=MAX_LOG)]


class LogPartResponse(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """Whole frames of a log; ``identity`` is empty if the sender has no such log."""

    serial: Serial
    identity: Annotated[bytes, Meta(max_length=16)]
    offset: Annotated[int, Meta(ge=0, le=MAX_LOG)]
    data: Annotated[bytes, Meta(max_length=MAX_PART)]
    size: Annotated[int, Meta(ge=0, le=MAX_LOG)]


HistoryMessage = HeldLogsRequest | HeldLogsResponse | LogPartRequest | LogPartResponse
CheckpointRequest = HeldCheckpointsRequest | FilesRequest | CopyOffer
CheckpointAnswer = HeldCheckpointsResponse | FilesResponse | CopyResult
ValuesMessage = ValuesRequest | ValuesResponse
RunMessage = (
    RecordUpdate
    | ReportUpdate
    | LogRequest
    | LogResponse
    | ValuesMessage
    | CheckpointRequest
    | CheckpointAnswer
    | HistoryMessage
)
AgentQuestion = CheckpointRequest | HeldLogsRequest | LogPartRequest
AgentAnswer = CheckpointAnswer | HeldLogsResponse | LogPartResponse

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RunMessage] = msgspec.msgpack.Decoder(RunMessage)


def encode(message: RunMessage) -> bytes:
    """Encode a message with its kind byte."""
    return protocol.RUN + _encoder.encode(message)


def decode(data: bytes | memoryview) -> RunMessage:
    """Decode a message; raise ProtocolError if it is invalid."""
    return protocol.decode(_decoder, data)
