"""What agents send each other: one byte says whose message it is, the rest is that package's own."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from barnraise.core import decoding
from barnraise.membership.messages import Message

MEMBERSHIP = b"m"
GREETING = b"g"
BOARD = b"b"
TRAIN = b"t"
SURVEY = b"s"
REMOVED = b"r"
RUN = b"u"
SHIP = b"h"
GUEST_BOARD = b"q"

Address = Annotated[str, Meta(max_length=64)]
T = TypeVar("T")


class PeerHello(msgspec.Struct, frozen=True, array_like=True):
    """Who I am to people, and where else I can be reached. ``epoch``: how many discovery secrets I know."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    version: Annotated[str, Meta(max_length=64)]
    addresses: Annotated[tuple[Address, ...], Meta(max_length=16)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    epoch: Annotated[int, Meta(ge=1, le=4096)]
    machine: Annotated[bytes, Meta(max_length=16384)] = b""


_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_greetings = msgspec.msgpack.Decoder(PeerHello)


def encode_membership(message: Message) -> bytes:
    return MEMBERSHIP + _encoder.encode(message)


def encode_hello(hello: PeerHello) -> bytes:
    return GREETING + _encoder.encode(hello)


def decode_membership(data: bytes | memoryview) -> Message:
    return decode(_messages, data)


def decode_hello(data: bytes | memoryview) -> PeerHello:
    return decode(_greetings, data)


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    """ProtocolError for anything that is not of the decoder's type."""
    return decoding.decode(decoder, data, "a message between agents cannot be read")
