"""Datagrams of the broadcast finder: a query for a tag and its answer, 24 bytes each. Pure.

    bytes    what   value
    0 to 3   magic  ``bkyd``
    4        form   1
    5        kind   1 question, 2 answer
    6 to 21  tag    the namespace tag
    22, 23   port   where the sender can be dialled; 0 if it cannot under this tag

An answer is as long as its question, so that it cannot be abused to multiply traffic.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

from barnraise.discovery.namespace import TAG_BYTES

_LAYOUT = struct.Struct(f">4sBB{TAG_BYTES}sH")
_MAGIC = b"bkyd"
_FORM = 1
_KINDS: dict[int, Literal["question", "answer"]] = {1: "question", 2: "answer"}
_NUMBERS = {kind: number for number, kind in _KINDS.items()}
DATAGRAM_BYTES = _LAYOUT.size


@dataclass(frozen=True)
class Datagram:
    """Query for a tag or its answer, between machines that do not know each other yet."""

    kind: Literal["question", "answer"]
    tag: str
    port: int


def encode_datagram(datagram: Datagram) -> bytes:
    return _LAYOUT.pack(_MAGIC, _FORM, _NUMBERS[datagram.kind], bytes.fromhex(datagram.tag), datagram.port)


def decode_datagram(data: bytes) -> Datagram | None:
    """Decode a datagram; return None for anything else, and for an answer without a port."""
    if len(data) != DATAGRAM_BYTES:
        return None
    magic, form, number, tag, port = _LAYOUT.unpack(data)
    kind = _KINDS.get(number)
    if magic != _MAGIC or form != _FORM or kind is None or (kind == "answer" and port == 0):
        return None
    return Datagram(kind, tag.hex(), port)
