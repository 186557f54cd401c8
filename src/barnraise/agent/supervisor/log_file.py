"""The output of a worker on disk: bounded, and readable by another process while it is written.

A log is a few segment files ``NAME.OFFSET``. The offset counts every byte that was written before the
segment. The oldest segments are removed as new ones are written. Bytes that a full disk lost are a gap
between two segments.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from barnraise.agent.supervisor.messages import MAX_LOG_BYTES

_SEGMENTS = 4
_DIGITS = 20
_RETRY_S = 1.0
_BINARY: int = getattr(os, "O_BINARY", 0)


class LogPart(msgspec.Struct, frozen=True):
    """Bytes of a log; ``end``: where the whole log ends now.

    ``start`` is later than the requested offset if older bytes were removed. There is more to read while
    ``start + len(data)`` is less than ``end``.
    """

    start: int
    data: bytes
    end: int


class LogWriter:
    """Appender to a log; it continues where an earlier writer stopped. One writer at a time."""

    def __init__(
        self,
        path: Path,
        most_bytes: int = MAX_LOG_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._segment_bytes = max(1, most_bytes // _SEGMENTS)
        self._most_bytes = most_bytes
        self._clock = clock
        self._retry_at = 0.0
        self._file = -1
        self._segments: list[tuple[int, int]] = []  # start and size of each that is on disk, oldest first
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for start, file in _segments(path):
            self._segments.append((start, file.stat().st_size))
        self.end = sum(self._segments[-1]) if self._segments else 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; raise OSError if the disk rejects them.

        Lost bytes are counted, and for one second no write is tried.
        """
        rest = memoryview(data)
        if self._file < 0 and self._clock() < self._retry_at:
            self.end += len(rest)
            return
        try:
            while rest:
                written = os.write(self._open_segment(), rest[: self._left()])
                start, size = self._segments[-1]
                self._segments[-1] = (start, size + written)
                self.end += written
                rest = rest[written:]
        except OSError:
            self.end += len(rest)
            self._retry_at = self._clock() + _RETRY_S
            self._abandon_segment()
            raise

    def close(self) -> None:
        """Close the current segment."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _left(self) -> int:
        return self._segment_bytes - self._segments[-1][1]

    def _open_segment(self) -> int:
        """Return the file to append to, with room for at least one byte."""
        joins = bool(self._segments) and sum(self._segments[-1]) == self.end and self._left() > 0
        if self._file >= 0 and joins:
            return self._file
        self.close()
        if not joins:
            self._drop_oldest()
        start = self._segments[-1][0] if joins else self.end
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _BINARY
        self._file = os.open(_segment(self._path, start), flags, 0o600)
        if not joins:
            self._segments.append((start, 0))
        return self._file

    def _drop_oldest(self) -> None:
        while self._segments:
            if sum(size for _, size in self._segments) + self._segment_bytes <= self._most_bytes:
                return
            try:
                os.unlink(_segment(self._path, self._segments[0][0]))
            except FileNotFoundError:
                pass
            except PermissionError:
                return  # Windows, while another process reads it: next time
            del self._segments[0]

    def _abandon_segment(self) -> None:
        self.close()
        if self._segments and self._segments[-1][1] == 0:
            start, _ = self._segments.pop()
            try:
                os.unlink(_segment(self._path, start))
            except OSError:
                pass  # an empty file is harmless


def read_log(path: Path, offset: int, max_bytes: int) -> LogPart:
    """Return up to ``most`` bytes from ``offset`` on, up to the next gap.

    If those bytes were removed, it starts at the first byte that is kept.
    """
    first: int | None = None
    offset = max(offset, 0)
    position, end = offset, 0
    parts: list[bytes] = []
    for start, file in _segments(path):
        try:
            with open(file, "rb", buffering=0) as segment:
                stop = start + os.fstat(segment.fileno()).st_size
                end = max(end, stop)
                if stop <= position or max_bytes <= 0 or (first is not None and start > position):
                    continue
                if first is None:
                    first = position = max(offset, start)
                segment.seek(position - start)
                data = segment.read(min(max_bytes, stop - position))
        except FileNotFoundError:
            continue  # removed meanwhile
        parts.append(data)
        position += len(data)
        max_bytes -= len(data)
    return LogPart(first if first is not None else min(offset, end), b"".join(parts), end)


def _segment(path: Path, start: int) -> Path:
    return path.with_name(f"{path.name}.{start:0{_DIGITS}d}")


def _segments(path: Path) -> list[tuple[int, Path]]:
    """Return the segments with their offsets, oldest first."""
    segments = []
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return []
    for name in names:
        before, _, digits = name.rpartition(".")
        if before == path.name and len(digits) == _DIGITS and digits.isascii() and digits.isdigit():
            segments.append((int(digits), path.with_name(name)))
    return sorted(segments)
