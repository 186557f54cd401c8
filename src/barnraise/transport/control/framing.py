"""Framing of control connections: messages, pings and the opening. Pure.

Layout in ``docs/wire/control.md``, fixed by ``tests/vectors/control.json``.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from barnraise.core.errors import ProtocolError
from barnraise.transport.listener.preface import Preface

_HEADER = struct.Struct("<IB")
_OPENING = struct.Struct("<BHHH")
HEADER_BYTES = _HEADER.size
PING_BYTES = 8


class ControlFrameKind(IntEnum):
    """Kinds of control frames."""

    MESSAGE = 0
    PING = 1
    PONG = 2
    OPEN = 3


_FIXED = {
    ControlFrameKind.PING: PING_BYTES,
    ControlFrameKind.PONG: PING_BYTES,
    ControlFrameKind.OPEN: _OPENING.size,
}


class ControlFrame(NamedTuple):
    """Complete frame of a control connection."""

    kind: ControlFrameKind
    payload: bytes


def encode_control(kind: ControlFrameKind, payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), kind) + payload


def encode_opening(preface: Preface, version: int) -> bytes:
    """Encode the preface and the negotiated version, so that both sides can compare them under TLS."""
    opening = _OPENING.pack(preface.route, preface.version_min, preface.version_max, version)
    return encode_control(ControlFrameKind.OPEN, opening)


class ControlFrames:
    """Parser that cuts a byte stream into frames; it buffers at most one frame and the last input."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> ControlFrame | None:
        """Return the next complete frame, or None if more bytes are needed.

        Raise ProtocolError for a frame that is not allowed.
        """
        if len(self._buffer) < HEADER_BYTES:
            return None
        length, number = _HEADER.unpack_from(self._buffer)
        try:
            kind = ControlFrameKind(number)
        except ValueError:
            raise ProtocolError(f"there is no frame of kind {number}") from None
        if length > self._largest:
            raise ProtocolError(f"a frame claims {length} bytes, at most {self._largest} are allowed")
        if length != _FIXED.get(kind, length):
            raise ProtocolError(f"a {kind.name.lower()} of {length} bytes has a wrong form")
        end = HEADER_BYTES + length
        if len(self._buffer) < end:
            return None
        frame = ControlFrame(kind, bytes(memoryview(self._buffer)[HEADER_BYTES:end]))
        del self._buffer[:end]
        return frame
