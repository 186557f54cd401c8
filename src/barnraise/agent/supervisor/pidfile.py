"""Pid file of a supervisor: with it a later agent finds and kills processes that were left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.files import write_atomically

SUFFIX = ".supervisor"
_MAX_BYTES = 256 << 10

Mark = Annotated[str, Meta(pattern="^[0-9a-f]{32}\\Z")]


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """A process by number and start time, because numbers are reused."""

    pid: Annotated[int, Meta(ge=1, lt=1 << 32)]
    started: Annotated[float, Meta(ge=0, le=1e12)]  # wall clock, as the system reports it


class PidRecord(msgspec.Struct, frozen=True):
    """Content of a pid file."""

    mark: Mark
    run: Annotated[str, Meta(max_length=128)] = ""
    generation: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    supervisor: ProcessIdentity | None = None
    workers: Annotated[tuple[ProcessIdentity, ...], Meta(max_length=1024)] = ()


_decoder = msgspec.json.Decoder(PidRecord)


def record_path(directory: Path, mark: str) -> Path:
    """Return the path of a supervisor's pid file."""
    return directory / f"{mark}{SUFFIX}"


def write_record(directory: Path, record: PidRecord) -> None:
    """Write a pid file atomically; raise OSError if that fails."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(record_path(directory, record.mark), msgspec.json.encode(record))


def read_record(path: Path) -> PidRecord:
    """Read a pid file; raise OSError or ProtocolError if it is unreadable."""
    with open(path, "rb") as file:
        content = file.read(_MAX_BYTES)
    return decode(_decoder, content, f"{path} is not a pid file of a supervisor")
