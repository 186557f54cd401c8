"""Requests of a process to the cluster's key-value store, and the responses. Pure.

Every agent of the cluster holds a replica of the store. A namespace belongs to one generation of one run. A
client numbers its writes: a write that is repeated after a lost response is recognised and not applied twice.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode

LARGEST_KEY = 1024
LARGEST_VALUE = (1 << 20) - (16 << 10)  # the rest of 1 MiB is for keys, names and the envelope
MOST_KEYS_AT_ONCE = 100_000
LOBBY = -1  # the generation of a scope where processes meet before they have one; it is never stale

RunName = Annotated[str, Meta(min_length=1, max_length=200)]
Generation = Annotated[int, Meta(ge=LOBBY, le=2**63 - 1)]
ClientId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Serial = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Key = Annotated[str, Meta(max_length=LARGEST_KEY)]
Keys = Annotated[tuple[Key, ...], Meta(max_length=MOST_KEYS_AT_ONCE)]
Value = Annotated[bytes, Meta(max_length=LARGEST_VALUE)]
Values = Annotated[tuple[Value, ...], Meta(max_length=MOST_KEYS_AT_ONCE)]
Amount = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
FoundingId = Annotated[bytes, Meta(max_length=8)]
Seconds = Annotated[float, Meta(ge=0, le=3600)]


class Namespace(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Namespace of keys: one generation of one run."""

    run: RunName
    generation: Generation

    def __str__(self) -> str:
        place = "the lobby" if self.generation == LOBBY else f"start {self.generation}"
        return f"{place} of run {self.run!r}"


class _Operation(msgspec.Struct, frozen=True, array_like=True):
    """``founding`` is the id of the store that the client knows; empty before the first response."""

    scope: Namespace
    client: ClientId
    serial: Serial
    founding: FoundingId


class SetKey(_Operation, frozen=True, array_like=True, tag="set"):
    key: Key
    value: Value


class AddToKey(_Operation, frozen=True, array_like=True, tag="add"):
    """Tells the new sum as ``count``; a key that is not there counts as 0."""

    key: Key
    amount: Amount


class CompareAndSet(_Operation, frozen=True, array_like=True, tag="compare_set"):
    """Write ``desired`` if the key has ``expected``, or is not there and ``expected`` is empty.

    Tells the value that the key has now; ``expected`` if it is not there at all.
    """

    key: Key
    expected: Value
    desired: Value


class AppendToKey(_Operation, frozen=True, array_like=True, tag="append"):
    key: Key
    value: Value


class DeleteKey(_Operation, frozen=True, array_like=True, tag="delete"):
    """Tells as ``count`` whether the key was there."""

    key: Key


class SetKeys(_Operation, frozen=True, array_like=True, tag="multi_set"):
    keys: Keys
    values: Values


class PushToQueue(_Operation, frozen=True, array_like=True, tag="push"):
    """Tells the queue's new length as ``count``. Queues have keys of their own, apart from the values."""

    key: Key
    value: Value


class PopFromQueue(_Operation, frozen=True, array_like=True, tag="pop"):
    """Tells the first value of the queue, or that the key is ``missing``."""

    key: Key


class DropNamespace(_Operation, frozen=True, array_like=True, tag="drop"):
    """Forget the scope: its generation has ended."""


class GetKey(_Operation, frozen=True, array_like=True, tag="get"):
    key: Key


class GetKeys(_Operation, frozen=True, array_like=True, tag="multi_get"):
    """Tells the values in order, as many as fit into one answer, or which keys are ``missing``."""

    keys: Keys


class CheckKeys(_Operation, frozen=True, array_like=True, tag="check"):
    """Tells which keys are ``missing``; a queue that is not empty counts as there."""

    keys: Keys


class CountResult(_Operation, frozen=True, array_like=True, tag="count"):
    """Tells the number of keys."""


class QueueLength(_Operation, frozen=True, array_like=True, tag="length"):
    """Tells how many values a queue has."""

    key: Key


class ReadQueue(_Operation, frozen=True, array_like=True, tag="read_queue"):
    """Tells the values of the queue from place ``start`` on, as many as fit into one answer, and as ``count``
    how many it has.
    """

    key: Key
    start: Serial


class WatchKey(_Operation, frozen=True, array_like=True, tag="watch"):
    """Like MultiGet (``fetch``) or Check, told once all keys are there, or when the patience has ended."""

    keys: Keys
    fetch: bool


Write = (
    SetKey
    | AddToKey
    | CompareAndSet
    | AppendToKey
    | DeleteKey
    | SetKeys
    | PushToQueue
    | PopFromQueue
    | DropNamespace
)
Read = GetKey | GetKeys | CheckKeys | CountResult | QueueLength | ReadQueue
Operation = Write | Read
WRITES = (
    SetKey,
    AddToKey,
    CompareAndSet,
    AppendToKey,
    DeleteKey,
    SetKeys,
    PushToQueue,
    PopFromQueue,
    DropNamespace,
)


class KvDone(msgspec.Struct, frozen=True, array_like=True, tag="done", omit_defaults=True):
    """``number`` is the operation's place in the store's history; a later one has a higher number."""

    number: Annotated[int, Meta(ge=0)]
    founding: FoundingId
    count: Amount = 0
    value: Annotated[bytes, Meta(max_length=LARGEST_VALUE)] | None = None
    values: Values = ()
    missing: Keys = ()


class KvDenied(msgspec.Struct, frozen=True, array_like=True, tag="denied"):
    """``late`` may have happened or not; every other reason means that nothing was done."""

    reason: Literal["stale", "lost", "full", "invalid", "late"]
    message: str
    hint: str


Result = KvDone | KvDenied


class KvRequest(msgspec.Struct, frozen=True, tag="store"):
    """``patience_s``: how long the agent may try before it says why it cannot.

    ``durable``: ask the store on the disks, which holds journals, instead of the one in memory.
    """

    operation: Operation | WatchKey
    patience_s: Seconds
    durable: bool = False


class KvResponse(msgspec.Struct, frozen=True, tag="store"):
    result: Result


class ClusterRequest(msgspec.Struct, frozen=True, tag="cluster"):
    """Request for the number of machines that take work."""


class ClusterResponse(msgspec.Struct, frozen=True, tag="cluster"):
    """Number of machines that take work, and the position of this one.

    ``world``: machines of the view that take work; 0 if this machine is in no view yet. ``node_index``:
    position of this machine among them; -1 if it does not take work.
    """

    world: Annotated[int, Meta(ge=0, le=65535)]
    node_index: Annotated[int, Meta(ge=-1, le=65535)]
    view: Annotated[int, Meta(ge=0)]


StoreRequest = KvRequest | ClusterRequest
StoreResponse = KvResponse | ClusterResponse

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[StoreRequest] = msgspec.msgpack.Decoder(StoreRequest)
_responses: msgspec.msgpack.Decoder[StoreResponse] = msgspec.msgpack.Decoder(StoreResponse)


def encode(message: StoreRequest | StoreResponse) -> bytes:
    return _encoder.encode(message)


def decode_request(data: bytes) -> StoreRequest:
    """Decode a request to the store. Raise ProtocolError unless it is one of ours and within its limits."""
    return decode(_requests, data, "a request to the store cannot be read")


def decode_response(data: bytes) -> StoreResponse:
    return decode(_responses, data, "a response of the store cannot be read")


def weight(operation: Operation | WatchKey) -> int:
    """Estimate the bytes of an operation on the wire."""
    match operation:
        case SetKey(value=value) | AppendToKey(value=value) | PushToQueue(value=value):
            return 400 + len(value)
        case CompareAndSet(expected=expected, desired=desired):
            return 400 + len(expected) + len(desired)
        case SetKeys(keys=keys, values=values):
            return 400 + sum(map(len, keys)) + sum(map(len, values)) + 10 * len(keys)
        case GetKeys(keys=keys) | CheckKeys(keys=keys) | WatchKey(keys=keys):
            return 400 + sum(map(len, keys)) + 5 * len(keys)
        case _:
            return 400
