"""What the copies of the board say to each other, and what a copy wants done. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from barnraise.agent_client.kv_messages import Operation, Result
from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError

CHUNK_BYTES = 256 << 10
LARGEST_MESSAGE = 1 << 20  # of an encoded message: what a link between agents carries
MOST_MEMBERS = 1024
LARGEST_IMAGE = 5 << 30

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NodeName = Annotated[bytes, Meta(min_length=1, max_length=64)]
Nonce = Annotated[bytes, Meta(max_length=16)]


class ReplicaView(msgspec.Struct, frozen=True, array_like=True):
    """The members, most senior first, and who of them votes.

    Numbers grow by one; each view was decided by a quorum of the one before. One that was decided by a
    person's word instead is ``forced``: its number may leap, and the members' newest copy counts.
    """

    number: Count
    members: Annotated[tuple[NodeName, ...], Meta(max_length=MOST_MEMBERS)]
    voters: Annotated[frozenset[NodeName], Meta(max_length=MOST_MEMBERS)]
    forced: bool = False

    @property
    def primary(self) -> bytes | None:
        """The most senior voter."""
        return next((node for node in self.members if node in self.voters), None)


IsQuorum = Callable[[ReplicaView, set[bytes]], bool]


class ViewBallot(msgspec.Struct, frozen=True, array_like=True):
    """One reign of a view's primary. ``nonce`` tells two lives of the same machine apart."""

    view: Count
    attempt: Count
    nonce: Nonce

    @property
    def rank(self) -> tuple[int, int]:
        return self.view, self.attempt


NOBODY = ViewBallot(0, 0, b"")


class PrepareView(msgspec.Struct, frozen=True, array_like=True, tag="gather"):
    """The new primary: what do you hold? Follow nobody older. ``known``: views not to be told."""

    ballot: ViewBallot
    known: Annotated[tuple[Count, ...], Meta(max_length=64)]


class ViewPromise(msgspec.Struct, frozen=True, array_like=True, tag="promise"):
    """I hold ``number`` operations of the reign ``held``. I may have forgotten views up to ``blind``."""

    ballot: ViewBallot
    held: ViewBallot
    number: Count
    blind: Count
    views: Annotated[tuple[ReplicaView, ...], Meta(max_length=64)]


class BallotRejected(msgspec.Struct, frozen=True, array_like=True, tag="outbid"):
    """I have promised this one already."""

    ballot: ViewBallot
    promised: ViewBallot


class AppendEntry(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """Hold these operations, the first of which is number ``first``.

    The reign began with ``base_number`` operations of ``base``; ``oldest`` is the first that the primary
    could still send.
    """

    ballot: ViewBallot
    base: ViewBallot
    base_number: Count
    oldest: Count
    first: Count
    operations: tuple[Operation, ...]


class AppendAck(msgspec.Struct, frozen=True, array_like=True, tag="held"):
    """I hold this many operations; ``follows``: of this reign. ``fetching``: send me none now."""

    ballot: ViewBallot
    number: Count
    follows: bool
    fetching: bool = False


class ResendRequest(msgspec.Struct, frozen=True, array_like=True, tag="knock"):
    """I am in your view and have no board of it: send me something."""

    view: Count


class SnapshotRequest(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Send me your board from ``offset`` on. A copy that is under way names what it is a copy of."""

    ballot: ViewBallot
    ticket: Nonce
    offset: Count
    held: ViewBallot
    number: Count


class SnapshotChunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    ticket: Nonce
    held: ViewBallot
    number: Count
    total: Annotated[int, Meta(ge=0, le=LARGEST_IMAGE)]
    offset: Count
    data: Annotated[bytes, Meta(max_length=CHUNK_BYTES)]


class ForwardedRequest(msgspec.Struct, frozen=True, array_like=True, tag="forward"):
    """An operation of a client of mine. ``life`` and ``request`` come back with the answer."""

    life: Nonce
    request: Count
    operation: Operation


class ClientReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    life: Nonce
    request: Count
    result: Result


Message = (
    PrepareView
    | ViewPromise
    | BallotRejected
    | AppendEntry
    | AppendAck
    | ResendRequest
    | SnapshotRequest
    | SnapshotChunk
    | ForwardedRequest
    | ClientReply
)


class ReplicaSend(NamedTuple):
    to: bytes
    message: Message


class ReplicaAnswer(NamedTuple):
    ticket: object
    result: Result


class ReplicaNote(NamedTuple):
    """For the log."""

    text: str


Effect = ReplicaSend | ReplicaAnswer | ReplicaNote

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_message(data: bytes) -> Message:
    """ProtocolError unless it is one of ours and within its bounds."""
    if len(data) > LARGEST_MESSAGE:
        raise ProtocolError("a message about the board cannot be read: too long")
    return decode(_decoder, data, "a message about the board cannot be read")
