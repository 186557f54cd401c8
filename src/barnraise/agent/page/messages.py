"""Messages between agents of owners: a request of the local interface to another machine. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.agent import protocol

MAX_REQUEST = 64 << 10
MAX_RESPONSE = 4 << 20
Serial = Annotated[int, Meta(ge=0, le=2**53)]


class OwnerRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask?"):
    """Request of an owner's machine, as its own local interface would take it."""

    serial: Serial
    body: Annotated[bytes, Meta(max_length=MAX_REQUEST)]


class OwnerResponse(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Response to such a request; if ``code`` is not empty, the error instead."""

    serial: Serial
    body: Annotated[bytes, Meta(max_length=MAX_RESPONSE)] = b""
    code: Annotated[str, Meta(max_length=64)] = ""
    message: Annotated[str, Meta(max_length=4000)] = ""
    hint: Annotated[str, Meta(max_length=4000)] = ""


OwnerMessage = OwnerRequest | OwnerResponse

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[OwnerMessage] = msgspec.msgpack.Decoder(OwnerMessage)


def encode(message: OwnerMessage) -> bytes:
    """Encode a message with its kind byte."""
    return protocol.OWNER + _encoder.encode(message)


def decode(data: bytes | memoryview) -> OwnerMessage:
    """Decode a message; raise ProtocolError if it is invalid."""
    return protocol.decode(_decoder, data)
