"""Messages between the replicas of the key-value store, and the effects that a replica returns. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from barnraise.agent_client.kv_messages import Operation, Result
from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError

CHUNK_BYTES = 256 << 10
MAX_MESSAGE_BYTES = 1 << 20  # limit of a link between two agents
MAX_MEMBERS = 1024
MAX_SNAPSHOT_BYTES = 5 << 30

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NodeName = Annotated[bytes, Meta(min_length=1, max_length=64)]
Nonce = Annotated[bytes, Meta(max_length=16)]


class ReplicaView(msgspec.Struct, frozen=True, array_like=True):
    """Members of the cluster, most senior first, and which of them vote.

    View numbers grow by one, and a quorum of each view decides the next one. A ``forced`` view was decided
    by a person instead: its number may leap, and it keeps the newest log of its members.
    """

    number: Count
    members: Annotated[tuple[NodeName, ...], Meta(max_length=MAX_MEMBERS)]
    voters: Annotated[frozenset[NodeName], Meta(max_length=MAX_MEMBERS)]
    forced: bool = False

    @property
    def primary(self) -> bytes | None:
        """Return the most senior voter, or None if there is no voter."""
        return next((node for node in self.members if node in self.voters), None)


IsQuorum = Callable[[ReplicaView, set[bytes]], bool]


class ViewBallot(msgspec.Struct, frozen=True, array_like=True):
    """Ballot of one attempt to be primary of a view.

    ``nonce`` tells two incarnations of the same machine apart.
    """

    view: Count
    attempt: Count
    nonce: Nonce

    @property
    def rank(self) -> tuple[int, int]:
        return self.view, self.attempt


NO_BALLOT = ViewBallot(0, 0, b"")


class ReplicaState(msgspec.Struct, frozen=True, array_like=True):
    """Promises and log position of a durable replica; its contents are saved beside it.

    ``views``: the views that a quorum may have to be found in. ``forgotten_until``: see `ViewPromise`.
    """

    promised: ViewBallot
    log_ballot: ViewBallot
    op_number: Count
    forgotten_until: Count
    views: Annotated[tuple[ReplicaView, ...], Meta(max_length=64)]


class PrepareView(msgspec.Struct, frozen=True, array_like=True, tag="gather"):
    """New primary asks for the state of a log, and that older ballots are rejected from now on.

    ``known``: numbers of the views that the reply need not contain.
    """

    ballot: ViewBallot
    known: Annotated[tuple[Count, ...], Meta(max_length=64)]


class ViewPromise(msgspec.Struct, frozen=True, array_like=True, tag="promise"):
    """Reply to `PrepareView`: last ballot and operation number of the sender's log.

    ``forgotten_until``: the sender may have lost its state of the views up to this number.
    """

    ballot: ViewBallot
    log_ballot: ViewBallot
    op_number: Count
    forgotten_until: Count
    views: Annotated[tuple[ReplicaView, ...], Meta(max_length=64)]


class BallotRejected(msgspec.Struct, frozen=True, array_like=True, tag="outbid"):
    """Reply to a ballot that is older than the promised one."""

    ballot: ViewBallot
    promised: ViewBallot


class AppendEntry(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """Primary sends operations to append to the log; the first one has number ``first_op``.

    The primary started from ``base_op_number`` operations of ``base_ballot``. ``oldest_op`` is the first
    operation that the primary can still send.
    """

    ballot: ViewBallot
    base_ballot: ViewBallot
    base_op_number: Count
    oldest_op: Count
    first_op: Count
    operations: tuple[Operation, ...]


class AppendAck(msgspec.Struct, frozen=True, array_like=True, tag="held"):
    """Backup acknowledges the operations up to ``op_number``.

    ``follows``: its log belongs to this ballot. ``is_fetching``: it receives a snapshot and needs no
    operations now.
    """

    ballot: ViewBallot
    op_number: Count
    follows: bool
    is_fetching: bool = False


class ResendRequest(msgspec.Struct, frozen=True, array_like=True, tag="knock"):
    """Backup without state of the current view asks the primary to send some."""

    view: Count


class SnapshotRequest(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Request for a snapshot of the store from ``offset`` on.

    A transfer in progress names the log position that its snapshot was taken at.
    """

    ballot: ViewBallot
    transfer: Nonce
    offset: Count
    log_ballot: ViewBallot
    op_number: Count


class SnapshotChunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    """Part of a snapshot that was taken at one log position."""

    transfer: Nonce
    log_ballot: ViewBallot
    op_number: Count
    total: Annotated[int, Meta(ge=0, le=MAX_SNAPSHOT_BYTES)]
    offset: Count
    data: Annotated[bytes, Meta(max_length=CHUNK_BYTES)]


class ForwardedRequest(msgspec.Struct, frozen=True, array_like=True, tag="forward"):
    """Operation of a client that a backup forwards to the primary.

    ``incarnation`` and ``request`` come back in the reply.
    """

    incarnation: Nonce
    request: Count
    operation: Operation


class ClientReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """Result of a forwarded operation, for the client's machine."""

    incarnation: Nonce
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
    """Effect: send a message to another replica."""

    to: bytes
    message: Message


class SavedReplica(NamedTuple):
    """Everything that the disk of a durable replica has; the numbered operations follow the snapshot."""

    state: ReplicaState
    snapshot: bytes
    operations: tuple[tuple[int, Operation], ...]


class UnsavedChange(NamedTuple):
    """Changes that must be on the disk before the effects are performed.

    ``snapshot``: contents that replace everything; None if only operations were added.
    """

    state: ReplicaState
    operations: tuple[tuple[int, Operation], ...]
    snapshot: bytes | None


class ReplicaAnswer(NamedTuple):
    """Effect: answer the local client that holds this ticket."""

    ticket: object
    result: Result


class ReplicaNote(NamedTuple):
    """Effect: write a line to the log file."""

    text: str


Effect = ReplicaSend | ReplicaAnswer | ReplicaNote

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """Encode a message for the link between two agents."""
    return _encoder.encode(message)


def decode_message(data: bytes) -> Message:
    """Decode a message of another replica; raise ProtocolError if it is malformed or too large."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError("a message of the key-value store cannot be read: it is too long")
    return decode(_decoder, data, "a message of the key-value store cannot be read")
