"""A small file per warden: what a later agent needs to find and kill what an earlier one left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.files import write_whole

SUFFIX = ".warden"
_MAX_BYTES = 256 << 10

Mark = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """A process: its number may be used again, but not with the same start."""

    pid: Annotated[int, Meta(ge=1, lt=1 << 32)]
    started: Annotated[float, Meta(ge=0, le=1e12)]  # by the wall clock, as the system itself tells it


class PidRecord(msgspec.Struct, frozen=True):
    mark: Mark
    run: Annotated[str, Meta(max_length=128)] = ""
    generation: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    warden: ProcessIdentity | None = None
    workers: Annotated[tuple[ProcessIdentity, ...], Meta(max_length=1024)] = ()


_decoder = msgspec.json.Decoder(PidRecord)


def record_path(directory: Path, mark: str) -> Path:
    return directory / f"{mark}{SUFFIX}"


def write_record(directory: Path, record: PidRecord) -> None:
    """Whole or not at all; OSError if it cannot be written."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(record_path(directory, record.mark), msgspec.json.encode(record))


def read_record(path: Path) -> PidRecord:
    """OSError, or ProtocolError if it is not one of ours."""
    with open(path, "rb") as file:
        content = file.read(_MAX_BYTES)
    return decode(_decoder, content, f"{path} is no record of a warden")
