"""Envelope of messages between agents: one byte names the service, the rest is its own format."""

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
JOURNAL = b"j"
QUEUE = b"a"
PAUSE = b"p"
OWNER = b"o"

Address = Annotated[str, Meta(max_length=64)]
T = TypeVar("T")


class PeerHello(msgspec.Struct, frozen=True, array_like=True):
    """First message of a connection: name, version, addresses and hardware of the sender.

    ``epoch``: number of discovery secrets that the sender knows.
    """

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    version: Annotated[str, Meta(max_length=64)]
    addresses: Annotated[tuple[Address, ...], Meta(max_length=16)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    epoch: Annotated[int, Meta(ge=1, le=4096)]
    machine: Annotated[bytes, Meta(max_length=16384)] = b""
    paused: Annotated[str, Meta(max_length=200)] = ""  # why runs of other machines may not use it now
    notifies: bool = False  # it has a target for notices of failures


_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_greetings = msgspec.msgpack.Decoder(PeerHello)


def encode_membership(message: Message) -> bytes:
    """Encode a membership message with its kind byte."""
    return MEMBERSHIP + _encoder.encode(message)


def encode_hello(hello: PeerHello) -> bytes:
    """Encode a hello message with its kind byte."""
    return GREETING + _encoder.encode(hello)


def decode_membership(data: bytes | memoryview) -> Message:
    """Decode a membership message; raise ProtocolError if it is invalid."""
    return decode(_messages, data)


def decode_hello(data: bytes | memoryview) -> PeerHello:
    """Decode a hello message; raise ProtocolError if it is invalid."""
    return decode(_greetings, data)


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    """Decode a message; raise ProtocolError if it is not of the decoder's type."""
    return decoding.decode(decoder, data, "a message between agents cannot be read")
