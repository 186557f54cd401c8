"""Log of a run's entries in bytes: frames with a length and a checksum. Pure.

A frame has the length of its body, the CRC-32 of the body (four bytes each, little-endian), and the body.
A body is a list of entries in MessagePack. The first frame holds the head only.
Bytes after the last whole frame are the rest of an interrupted write, and do not count.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError
from barnraise.history.entries import MOST_ENTRIES, Entry, LogHead

MAX_BODY = 128 << 10  # a request for a part of a log brings at least one frame
_PREFIX = struct.Struct("<II")
_UNREADABLE = "the record of a run cannot be read"

_Body = Annotated[tuple[Entry, ...], Meta(max_length=MOST_ENTRIES)]
_encoder = msgspec.msgpack.Encoder()
_bodies: msgspec.msgpack.Decoder[tuple[Entry, ...]] = msgspec.msgpack.Decoder(_Body)


class DecodedLog(NamedTuple):
    """Entries of the whole frames at the beginning of some bytes, and how many bytes they take."""

    entries: tuple[Entry, ...]
    size: int

    @property
    def head(self) -> LogHead | None:
        """Return the head, if the bytes begin with one."""
        first = self.entries[0] if self.entries else None
        return first if isinstance(first, LogHead) else None


def encode_frames(entries: Sequence[Entry]) -> bytes:
    """Encode entries as one frame, or as several if there are too many bytes for one."""
    if not entries:
        return b""
    body = _encoder.encode(entries)
    if len(entries) > 1 and (len(body) > MAX_BODY or len(entries) > MOST_ENTRIES):
        half = len(entries) // 2
        return encode_frames(entries[:half]) + encode_frames(entries[half:])
    if len(body) > MAX_BODY:
        raise ProtocolError(f"an entry of {len(body)} bytes is too large for the record of a run")
    return _PREFIX.pack(len(body), zlib.crc32(body)) + body


def readable(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries that a reader accepts: one that is not within bounds would spoil the whole log."""
    if _is_readable(entries):
        return list(entries)
    return [entry for entry in entries if _is_readable([entry])]


def _is_readable(entries: Sequence[Entry]) -> bool:
    try:
        decode_frames(encode_frames(entries))
    except (ProtocolError, OverflowError, TypeError):  # the latter: numbers that MessagePack cannot hold
        return False
    return True


def whole_frames(data: bytes | memoryview) -> int:
    """Return the size of the whole frames at the beginning; their entries are not decoded."""
    view, position = memoryview(data), 0
    while (body := _body_at(view, position)) is not None:
        position += _PREFIX.size + len(body)
    return position


def first_frame(data: bytes | memoryview) -> int:
    """Return the size of the first frame; 0 if it is not whole."""
    body = _body_at(memoryview(data), 0)
    return 0 if body is None else _PREFIX.size + len(body)


def decode_frames(data: bytes | memoryview) -> DecodedLog:
    """Decode the whole frames at the beginning.

    Raise ProtocolError if a frame with a right checksum does not hold entries.
    """
    view, position = memoryview(data), 0
    entries: list[Entry] = []
    while (body := _body_at(view, position)) is not None:
        decoded: tuple[Entry, ...] = decode(_bodies, body, _UNREADABLE)
        entries.extend(decoded)
        position += _PREFIX.size + len(body)
    return DecodedLog(tuple(entries), position)


def decode_readable(data: bytes | memoryview) -> tuple[Entry, ...]:
    """Decode the whole frames at the beginning, and leave out those that do not hold entries."""
    view, position = memoryview(data), 0
    entries: list[Entry] = []
    while (body := _body_at(view, position)) is not None:
        with suppress(ProtocolError):
            decoded: tuple[Entry, ...] = decode(_bodies, body, _UNREADABLE)
            entries.extend(decoded)
        position += _PREFIX.size + len(body)
    return tuple(entries)


def pieces(data: bytes, most_bytes: int) -> Iterator[bytes]:
    """Yield whole frames of this many bytes at most; each frame alone fits."""
    start = end = 0
    while size := first_frame(memoryview(data)[end:]):
        if end > start and end + size - start > most_bytes:
            yield data[start:end]
            start = end
        end += size
    if end > start:
        yield data[start:end]


def _body_at(view: memoryview, position: int) -> memoryview | None:
    """Return the body of the frame there, or None if it is incomplete or damaged."""
    start = position + _PREFIX.size
    if len(view) < start:
        return None
    size, checksum = _PREFIX.unpack(view[position:start])
    if not size or size > MAX_BODY or len(view) < start + size:  # a power cut may leave zeros
        return None
    body = view[start : start + size]
    return body if zlib.crc32(body) == checksum else None
