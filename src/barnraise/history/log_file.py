"""Logs of runs on the disk: appended frames, one writer each. The only module here that touches files.

A frame is one ``write``, which survives the death of the process. `sync` brings it to the disk, so that it
also survives a power cut. A log that has become too large is rewritten smaller, under a new identity.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from barnraise.core.errors import ProtocolError
from barnraise.core.files import BINARY, discard, replace, sync, write_all, write_atomically
from barnraise.history.entries import Entry, LogHead, RunEnd
from barnraise.history.log_format import (
    MAX_BODY,
    decode_frames,
    decode_readable,
    encode_frames,
    first_frame,
    readable,
    whole_frames,
)
from barnraise.history.logs.compaction import compact

MAX_LOG_BYTES = 5 << 20
MAX_PART = 2 * MAX_BODY  # bytes of a log that are read at once; they hold a whole frame
_SUFFIX = ".log"
ALONE = "alone"  # name of the log of a machine without a key
_HEAD_BYTES = 4096
_TICK_S = 0.001
_NEWEST_BYTES = 64 << 10
_END_TAG = msgspec.msgpack.encode(RunEnd.__struct_config__.tag)

_log = logging.getLogger(__name__)


class RecordPart(NamedTuple):
    """Bytes of a log from an offset on; ``size``: of the log now."""

    identity: bytes
    offset: int
    data: bytes
    size: int


def history_directory(state: Path) -> Path:
    """Return the directory of the records of all runs."""
    return state / "history"


def log_path(state: Path, run: str, node: bytes) -> Path:
    """Return the log of one machine of a run."""
    return history_directory(state) / run / f"{node.hex() or ALONE}{_SUFFIX}"


def logs_of(state: Path, run: str) -> dict[bytes, Path]:
    """Return the logs of a run on this disk, by machine."""
    logs = {}
    for path in sorted((history_directory(state) / run).glob(f"*{_SUFFIX}")):
        name = path.name.removesuffix(_SUFFIX)
        try:
            logs[b"" if name == ALONE else bytes.fromhex(name)] = path
        except ValueError:
            continue
    return logs


def read_entries(path: Path) -> tuple[Entry, ...]:
    """Return the entries of a log; raise ProtocolError if it holds something else."""
    return decode_frames(path.read_bytes()).entries


def read_head(path: Path) -> LogHead | None:
    """Return the head of a log, or None if there is no log."""
    try:
        with open(path, "rb") as file:
            start = file.read(_HEAD_BYTES)
        return decode_frames(start[: first_frame(start)]).head
    except (FileNotFoundError, ProtocolError):
        return None


def read_identity(path: Path) -> bytes:
    """Return the identity of a log; empty if there is no log."""
    head = read_head(path)
    return head.identity if head is not None else b""


def has_end(path: Path) -> bool:
    """Tell whether the newest entries of a log seem to tell of the end of its run."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _NEWEST_BYTES))
        return _END_TAG in file.read()


def read_part(path: Path, identity: bytes, offset: int, max_bytes: int = MAX_PART) -> RecordPart:
    """Return whole frames of a log from an offset on; an unfinished last frame is left out.

    The part starts at the beginning if the log is not the one with this identity, or has fewer bytes. It
    does so, too, if no frame begins at the offset: a power cut took frames that the reader has.
    """
    own_identity = read_identity(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = offset if identity == own_identity and offset <= size else 0
        file.seek(start)
        data = file.read(min(max_bytes, MAX_PART))
        if start and data and not whole_frames(data):
            file.seek(0)
            if whole_frames(file.read(start)) < start:
                start = 0
                file.seek(start)
                data = file.read(min(max_bytes, MAX_PART))
    return RecordPart(own_identity, start, data[: whole_frames(data)], size)


class RunLogWriter:
    """Writer of one log; it truncates an interrupted write of an earlier writer, and continues after it.

    ``head``: of a new log. An existing log of the same run and machine keeps its own.
    """

    def __init__(self, path: Path, head: LogHead, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self.head = head
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._continue_existing():
            self._rewrite(())
        self._open()

    def append(self, entries: Sequence[Entry]) -> None:
        """Append entries, except those that no reader accepts; raise OSError if the disk is full."""
        accepted = readable(entries)
        if len(accepted) < len(entries):
            _log.warning("%s: %d entries are not valid", self._path, len(entries) - len(accepted))
        data = encode_frames(accepted)
        if os.fstat(self._file).st_size > self._size:  # what follows a part of a frame could never be read
            os.ftruncate(self._file, self._size)
        if self._size + len(data) > self._max_bytes:
            self._shrink()
        write_all(self._file, data)
        self._size += len(data)

    @property
    def size(self) -> int:
        """Return the bytes of the log."""
        return self._size

    def sync(self) -> None:
        """Write to the disk what was appended."""
        sync(self._file)

    def close(self) -> None:
        """Close the file; what was appended is on the disk."""
        sync(self._file)
        os.close(self._file)

    def _continue_existing(self) -> bool:
        """Truncate an existing log to its whole frames; return False if there is none of this machine."""
        head = read_head(self._path)
        if head is None or (head.run, head.node) != (self.head.run, self.head.node):
            return False
        self.head = head
        _truncate_to_frames(self._path)
        return True

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | BINARY)
        self._size = os.fstat(self._file).st_size

    def _rewrite(self, entries: Sequence[Entry]) -> None:
        # The file is later than the one before, also if the clock was set back meanwhile.
        at = max(time.time(), self.head.at + _TICK_S)
        self.head = msgspec.structs.replace(self.head, identity=secrets.token_bytes(16), at=at)
        write_atomically(self._path, encode_frames([self.head]) + encode_frames(entries), synced=True)

    def _shrink(self) -> None:
        """Rewrite the log with at most half of the allowed bytes, if its events leave that much room."""
        content = decode_readable(self._path.read_bytes())
        entries = [entry for entry in content if not isinstance(entry, LogHead)]
        os.close(self._file)
        try:
            self._rewrite(compact(entries, self._max_bytes // 2))
        finally:
            self._open()


class RunLogCopy:
    """Copy of another machine's log. It grows by whole frames, and follows a log that was replaced.

    ``identity``, ``size``: of the log that is being copied, and how much of it is here. While a replaced log
    is copied again, the earlier copy stays readable until all of the new one is here.
    """

    def __init__(self, path: Path, run: str, node: bytes, max_bytes: int = 2 * MAX_LOG_BYTES) -> None:
        self._path, self._run, self._node, self._max_bytes = path, run, node, max_bytes
        self._draft = path.with_name(f"{path.name}.new")
        self._target = path
        discard(self._draft)
        self.identity, self.size = b"", 0
        if path.exists():
            self.size = _truncate_to_frames(path)
            self.identity = read_identity(path)

    def add(self, part: RecordPart, changed_at: float | None = None) -> bool:
        """Append a part that was read at ``size``; return True if more of the log is left to read.

        A part from the beginning starts the copy again, because the log was replaced or has shrunk. So does
        a copy that another process has changed or removed. ``changed_at``: when the log was last written,
        which is then the time of the copy. Raise ProtocolError if it is not a part of this log.
        """
        if part.offset == 0:
            self._start(part)
        elif not self._target.exists() or self._target.stat().st_size != self.size:
            self.identity, self.size = b"", 0
            return True
        elif (part.identity, part.offset) != (self.identity, self.size):
            raise ProtocolError("a part of a run's record does not continue its copy")
        data = part.data[: whole_frames(part.data)]
        if self.size + len(data) > self._max_bytes:
            raise ProtocolError(f"the record of run {self._run} on another machine is too large")
        try:
            with open(self._target, "ab") as file:
                file.write(data)
        except OSError:  # what follows a part of a frame could never be read
            with suppress(OSError):
                os.truncate(self._target, self.size)
            raise
        self.size += len(data)
        if changed_at is not None:
            os.utime(self._target, (changed_at, changed_at))
        is_complete = self.size >= part.size
        if is_complete and self._target == self._draft:
            replace(self._draft, self._path)
            self._target = self._path
        return bool(data) and not is_complete

    def _start(self, part: RecordPart) -> None:
        head = decode_frames(part.data[: first_frame(part.data)]).head
        if head is None or (head.run, head.node, head.identity) != (self._run, self._node, part.identity):
            raise ProtocolError("a copied log does not begin with the head of its run and machine")
        self.identity, self.size = part.identity, 0
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._target = self._draft if self._path.exists() else self._path
        discard(self._draft)


def _truncate_to_frames(path: Path) -> int:
    """Remove what follows the last whole frame, and return the size."""
    data = path.read_bytes()
    size = whole_frames(data)
    if size < len(data):
        os.truncate(path, size)
    return size
