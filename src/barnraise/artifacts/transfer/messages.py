"""Messages between agents about pieces. Every length is bounded; a piece is a view of the message."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from barnraise.artifacts.store.manifest import MOST_ENCODED, PIECE, Digest
from barnraise.core import decoding

MOST_NAMES = 1024
MOST_TOGETHER = 512
TOGETHER_BYTES = 1 << 20  # small pieces travel together, up to so many bytes

Index = Annotated[int, Meta(ge=0, lt=1 << 28)]


class PieceName(NamedTuple):
    """Piece ``number`` of the content ``object``."""

    object: Digest
    number: Index


Names = Annotated[tuple[PieceName, ...], Meta(max_length=MOST_NAMES)]


class WantPieces(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """Request for pieces; with ``hold`` also for those that the server will have soon."""

    names: Names
    hold: bool


class PieceData(msgspec.Struct, frozen=True, array_like=True):
    """Piece of a content, with its bytes."""

    name: PieceName
    data: Annotated[memoryview, Meta(max_length=PIECE)]


class PieceList(msgspec.Struct, frozen=True, array_like=True, tag="have"):
    """Response with one large piece or many small ones."""

    pieces: Annotated[tuple[PieceData, ...], Meta(max_length=MOST_TOGETHER)]


class LacksPieces(msgspec.Struct, frozen=True, array_like=True, tag="lack"):
    """Response for pieces that the server will not send."""

    names: Names


class PieceSoon(msgspec.Struct, frozen=True, array_like=True, tag="soon"):
    """Notice that the server still waits for the requested pieces."""


class WantManifest(msgspec.Struct, frozen=True, array_like=True, tag="want-list"):
    id: Digest


class ManifestIs(msgspec.Struct, frozen=True, array_like=True, tag="list"):
    """Response with a manifest; empty if the server does not have it or may not send it."""

    id: Digest
    data: Annotated[bytes, Meta(max_length=MOST_ENCODED)]


Message = WantPieces | PieceList | LacksPieces | PieceSoon | WantManifest | ManifestIs
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """Decode a message; raise ProtocolError for anything else."""
    return decoding.decode(_decoder, data, "a message about pieces cannot be read")
