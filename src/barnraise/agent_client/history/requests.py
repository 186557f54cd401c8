"""Requests to this machine's agent about the records of runs, and the responses. Pure.

Logs travel as bytes: `barnraise.history` reads them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_FRAMES = 768 << 10  # bytes of one request of a worker
MAX_LOG_PART = 256 << 10
MOST_LOGS = 256  # of one response

# The name is a part of a path.
RunName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-z0-9][a-z0-9-]*\Z")]
RecordName = Annotated[str, Meta(min_length=1, max_length=48, pattern=r"^[a-z0-9][a-z0-9-]*\Z")]
Node = Annotated[bytes, Meta(max_length=32)]
Identity = Annotated[bytes, Meta(max_length=16)]
Offset = Annotated[int, Meta(ge=0, le=1 << 40)]


class RecordRequest(msgspec.Struct, frozen=True, tag="record?"):
    """Frames of entries that a worker adds to the record of its run."""

    run: RunName
    local_rank: Annotated[int, Meta(ge=0, le=64)]
    start: Annotated[int, Meta(ge=0, le=1 << 40)]
    frames: Annotated[bytes, Meta(max_length=MAX_FRAMES)]


class HistoryListRequest(msgspec.Struct, frozen=True, tag="histories?"):
    """Request for the logs that this machine keeps; those of one run only if ``run`` is given.

    A run is found by the beginning of its name. ``after``: the last run of the response before.
    """

    run: Annotated[str, Meta(max_length=64)] = ""
    after: Annotated[str, Meta(max_length=64)] = ""


class HistoryPartRequest(msgspec.Struct, frozen=True, tag="history?"):
    """Request for the bytes of a log from an offset on; ``identity``: of the log that the reader has."""

    run: RunName
    node: Node
    identity: Identity = b""
    offset: Offset = 0


class HistoryRemoveRequest(msgspec.Struct, frozen=True, tag="remove-history"):
    """Request to remove the records of these runs from all machines of owners."""

    runs: Annotated[tuple[RecordName, ...], Meta(min_length=1, max_length=MOST_LOGS)]


HistoryRequest = RecordRequest | HistoryListRequest | HistoryPartRequest | HistoryRemoveRequest


class KeptLog(msgspec.Struct, frozen=True, array_like=True):
    """Log of one machine of a run. ``changed_at``: seconds since 1970."""

    run: str
    node: bytes
    size: int
    changed_at: float


class HistoryListResponse(msgspec.Struct, frozen=True, tag="histories"):
    """Logs by run, the newest runs first. ``has_more``: ask again after the last run."""

    logs: tuple[KeptLog, ...]
    has_more: bool = False


class HistoryPartResponse(msgspec.Struct, frozen=True, tag="history"):
    """Whole frames of a log. ``offset`` is 0 if the log was replaced; ``size``: of the log now."""

    identity: bytes
    offset: int
    data: bytes
    size: int


HistoryAnswer = HistoryListResponse | HistoryPartResponse
