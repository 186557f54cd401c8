"""Messages between agents about pauses that a person asks for on another machine. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.agent import protocol

Serial = Annotated[int, Meta(ge=0, le=2**53)]
Sentence = Annotated[str, Meta(max_length=1000)]


class PauseOrder(msgspec.Struct, frozen=True, array_like=True, tag="pause"):
    """Request of an owner: pause this machine, or let runs use it again. ``until``: Unix time; 0: no end."""

    serial: Serial
    paused: bool
    until: Annotated[float, Meta(ge=0, le=1e12)] = 0.0


class PauseAnswer(msgspec.Struct, frozen=True, array_like=True, tag="paused"):
    """Result of a pause order: what was done, or with ``done`` False why not."""

    serial: Serial
    done: bool
    sentence: Sentence


PauseMessage = PauseOrder | PauseAnswer

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[PauseMessage] = msgspec.msgpack.Decoder(PauseMessage)


def encode(message: PauseMessage) -> bytes:
    """Encode a message with its kind byte."""
    return protocol.PAUSE + _encoder.encode(message)


def decode(data: bytes | memoryview) -> PauseMessage:
    """Decode a message; raise ProtocolError if it is invalid."""
    return protocol.decode(_decoder, data)
