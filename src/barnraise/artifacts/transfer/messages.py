"""What agents say to each other about pieces. Every length is bounded; a piece is a view of the message."""

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
    """Send me these; with ``hold`` also those that you will have soon."""

    names: Names
    hold: bool


class PieceData(msgspec.Struct, frozen=True, array_like=True):
    """One of them."""

    name: PieceName
    data: Annotated[memoryview, Meta(max_length=PIECE)]


class PieceList(msgspec.Struct, frozen=True, array_like=True, tag="have"):
    """One large or many small ones."""

    pieces: Annotated[tuple[PieceData, ...], Meta(max_length=MOST_TOGETHER)]


class LacksPieces(msgspec.Struct, frozen=True, array_like=True, tag="lack"):
    """These will not come from me."""

    names: Names


class PieceSoon(msgspec.Struct, frozen=True, array_like=True, tag="soon"):
    """I still wait for what you want from me."""


class WantManifest(msgspec.Struct, frozen=True, array_like=True, tag="want-list"):
    id: Digest


class ManifestIs(msgspec.Struct, frozen=True, array_like=True, tag="list"):
    """Empty if I do not have it, or not for you."""

    id: Digest
    data: Annotated[bytes, Meta(max_length=MOST_ENCODED)]


Message = WantPieces | PieceList | LacksPieces | PieceSoon | WantManifest | ManifestIs
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """ProtocolError for anything else."""
    return decoding.decode(_decoder, data, "a message about pieces cannot be read")
