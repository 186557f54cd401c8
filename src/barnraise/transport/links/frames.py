"""The frame: what every link carries. Fixed little-endian layout, no native struct ever reaches the wire.

A frame is a 32-byte header and ``length`` bytes of payload::

    0  kind      u8     what it is
    1  flags     u8     zero today; a receiver refuses others
    2  reserved  u16    zero
    4  length    u32    payload bytes that follow, bounded by kind
    8  group     u64    tag of (run, generation, group name); 0 = the link itself
    16 sequence  u64    the operation within the group
    24 first     u32    meaning depends on kind
    28 second    u32    meaning depends on kind
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from barnraise.core.errors import ProtocolError

HEADER_BYTES = 32
MAX_PAYLOAD = 1 << 20
MAX_CONTROL = 32 << 10
EAGER_BYTES = 16 << 10

_LAYOUT = struct.Struct("<BBHIQQII")


class FrameKind(IntEnum):
    """Kinds of frames on the wire. Never reuse a number."""

    HELLO = 1  # link: the sender's identity, once, first
    PING = 2  # link: heartbeat; first = serial
    PONG = 3  # link: answer to PING; first = serial
    GOODBYE = 4  # link: I leave on purpose
    JOIN = 5  # group: I am in it, with this membership
    MEASURE = 6  # group: what I measured, to rank 0
    TABLE = 7  # group: the cost table all use, from rank 0
    FAIL = 8  # group: it is over, and why
    LEAVE = 9  # group: I closed it
    PROBE = 10  # link: bandwidth probe payload; first = index, second = count
    PROBED = 11  # link: answer; payload: bytes and seconds seen
    OPEN = 16  # operation: I have started it, with this specification
    DATA = 17  # operation: bytes; first = ordinal of this message on this pair
    ASK = 18  # operation: where are you?
    TELL = 19  # operation: first = 1 if I have started it; payload: as what, while I remember
    OFFER = 24  # point to point: I want to send; first = tag
    ACCEPT = 25  # point to point: send it now
    PARCEL = 26  # point to point: bytes; second = offset / MAX_PAYLOAD
    EAGER = 27  # point to point: offer and bytes in one
    TAKEN = 28  # point to point: your eager bytes were consumed


# Sent in the order given, from their owner's memory; all others may pass between two of these. An OFFER is
# one of them so that it cannot overtake an EAGER message under the same tag.
BULK = frozenset({FrameKind.DATA, FrameKind.PARCEL, FrameKind.EAGER, FrameKind.OFFER, FrameKind.PROBE})
_BY_NUMBER = {int(kind): kind for kind in FrameKind}


class FrameHeader(NamedTuple):
    """Parsed header with fields within bounds."""

    kind: FrameKind
    length: int = 0
    group: int = 0
    sequence: int = 0
    first: int = 0
    second: int = 0

    def encode(self) -> bytes:
        return _LAYOUT.pack(self.kind, 0, 0, self.length, self.group, self.sequence, self.first, self.second)


def parse_header(data: bytes | bytearray | memoryview, offset: int = 0) -> FrameHeader:
    """Parse one header; raise ProtocolError for anything that is not allowed."""
    number, flags, reserved, length, group, sequence, first, second = _LAYOUT.unpack_from(data, offset)
    kind = _BY_NUMBER.get(number)
    if kind is None:
        raise ProtocolError(f"frame of unknown kind {number}")
    if flags or reserved:
        raise ProtocolError(f"{kind.name} frame with unknown flags {flags:#x}/{reserved:#x}")
    limit = MAX_PAYLOAD if kind in BULK else MAX_CONTROL
    if length > limit:
        raise ProtocolError(f"{kind.name} frame announces {length} bytes; at most {limit} are allowed")
    return FrameHeader(kind, length, group, sequence, first, second)
