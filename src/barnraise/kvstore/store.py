"""The board: a bounded key-value store, changed only by numbered operations, the same everywhere. Pure.

Every copy that applies the same operations in the same order is the same board. Nothing here may depend on
a clock, on chance or on the order of a set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Annotated, assert_never

import msgspec
from msgspec import Meta

from barnraise.agent_client.kv_messages import (
    LARGEST_KEY,
    LARGEST_VALUE,
    LOBBY,
    WRITES,
    AddToKey,
    AppendToKey,
    CheckKeys,
    CompareAndSet,
    CountResult,
    DeleteKey,
    DropNamespace,
    GetKey,
    GetKeys,
    KvDenied,
    KvDone,
    Namespace,
    Operation,
    PopFromQueue,
    PushToQueue,
    QueueLength,
    Read,
    Result,
    SetKey,
    SetKeys,
    Write,
)
from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError
from barnraise.core.units import format_size

MOST_SCOPES = 64
MOST_KEYS = 100_000
MOST_CLIENTS = 10_000
SCOPE_BYTES = 64 << 20
_MOST_FENCES = 4096
_MOST_TOLD_MISSING = 512
_LIMIT = 2**63
_LONGEST_NUMBER = 64

_USE_ANOTHER_RUN = "Let the runs that have ended drop their scopes, or wait until idle ones are dropped."
_TOO_LATE = "End this process: a newer generation of the run has taken over."


class _Memory(msgspec.Struct, frozen=True, array_like=True):
    """The last write of a client, and what it was told."""

    serial: int
    result: Result


class _Image(msgspec.Struct, frozen=True, array_like=True):
    """A scope as it travels."""

    scope: Namespace
    values: dict[str, bytes]
    queues: dict[str, list[bytes]]
    clients: dict[bytes, _Memory]


class _StoreImage(msgspec.Struct, frozen=True, array_like=True):
    founding: bytes
    fences: Annotated[dict[str, int], Meta(max_length=_MOST_FENCES)]
    scopes: Annotated[list[_Image], Meta(max_length=MOST_SCOPES)]


class _Namespace:
    """The contents of one scope."""

    __slots__ = ("clients", "queues", "size", "values")

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.clients: dict[bytes, _Memory] = {}
        self.size = 0

    def has(self, key: str) -> bool:
        return key in self.values or key in self.queues

    def put(self, key: str, value: bytes) -> None:
        old = self.values.get(key)
        self.size += len(value) + (_length(key) if old is None else -len(old))
        self.values[key] = value

    def remember(self, client: bytes, memory: _Memory) -> None:
        old = self.clients.get(client)
        self.size += _told(memory.result) - (0 if old is None else _told(old.result))
        self.clients[client] = memory


class KeyValueStore:
    """``founding`` names the history that it belongs to; a board that lost its memory begins a new one."""

    def __init__(self, founding: bytes) -> None:
        self.founding = founding
        self._rooms: dict[Namespace, _Namespace] = {}
        # The oldest generation of a run that is not stale. What is older is never let in again.
        self._fences: dict[str, int] = {}

    @property
    def scopes(self) -> tuple[Namespace, ...]:
        return tuple(self._rooms)

    def has_room_for(self, scope: Namespace) -> bool:
        """Whether a write to it would find a place among the scopes."""
        return scope in self._rooms or len(self._rooms) - len(self._older(scope)) < MOST_SCOPES

    def has(self, scope: Namespace, key: str) -> bool:
        room = self._rooms.get(scope)
        return room is not None and room.has(key)

    def has_value(self, scope: Namespace, key: str) -> bool:
        """Not only a queue."""
        room = self._rooms.get(scope)
        return room is not None and key in room.values

    def apply(self, operation: Operation, number: int) -> Result:
        """Do it, once however often it is repeated, and say what came of it."""
        denied = self._fence(operation)
        if denied is not None:
            return denied
        if not isinstance(operation, WRITES):
            return self._read(operation, number)
        room = self._rooms.get(operation.scope)
        memory = None if room is None else room.clients.get(operation.client)
        if memory is not None and operation.serial <= memory.serial:
            if operation.serial == memory.serial:
                return memory.result
            return KvDenied("invalid", "this write comes after a later one of the same client", "Write anew.")
        if isinstance(operation, DropNamespace):
            return self._drop(operation, number)
        if room is None:
            found = self._open(operation.scope)
            if isinstance(found, KvDenied):
                return found
            room = found
        if operation.client not in room.clients and len(room.clients) >= MOST_CLIENTS:
            return _full(f"{operation.scope} has {MOST_CLIENTS} clients already")
        result = self._write(room, operation, number)
        room.remember(operation.client, _Memory(operation.serial, result))
        return result

    # snapshots

    def image(self) -> bytes:
        """The whole board as bytes."""
        scopes = [
            _Image(scope, room.values, {key: list(items) for key, items in room.queues.items()}, room.clients)
            for scope, room in self._rooms.items()
        ]
        return msgspec.msgpack.encode(_StoreImage(self.founding, self._fences, scopes))

    @classmethod
    def of_image(cls, data: bytes) -> KeyValueStore:
        """The board that `image` was made of; ProtocolError if it cannot be."""
        image = decode(_image_decoder, data, "a copy of the board cannot be read")
        board = cls(image.founding)
        board._fences = image.fences
        for one in image.scopes:
            room = _Namespace()
            for key, value in one.values.items():
                room.put(key, value)
            for key, items in one.queues.items():
                room.queues[key] = deque(items)
                room.size += _length(key) + sum(map(len, items))
            for client, memory in one.clients.items():
                room.remember(client, memory)
            if room.size > 2 * SCOPE_BYTES or len(room.values) + len(room.queues) > MOST_KEYS:
                raise ProtocolError(f"a copy of the board has too much in {one.scope}")
            board._rooms[one.scope] = room
        return board

    # scopes

    def _fence(self, operation: Operation) -> KvDenied | None:
        if operation.founding and operation.founding != self.founding:
            return KvDenied(
                "lost",
                "the board lost its memory, because too many machines that held it ended at once",
                "Start the run again; what it had on the board before is gone.",
            )
        scope = operation.scope
        newest = self._fences.get(scope.run, 0)
        if LOBBY < scope.generation < newest:
            return KvDenied(
                "stale", f"{scope} has ended; the run is at generation {newest} or after it", _TOO_LATE
            )
        return None

    def _older(self, scope: Namespace) -> list[Namespace]:
        if scope.generation == LOBBY:
            return []
        return [
            other
            for other in self._rooms
            if other.run == scope.run and LOBBY < other.generation < scope.generation
        ]

    def _open(self, scope: Namespace) -> _Namespace | KvDenied:
        if not self.has_room_for(scope):
            return _full(f"the board has {MOST_SCOPES} scopes already, none is left for {scope}")
        for other in self._older(scope):
            del self._rooms[other]
        if scope.generation > self._fences.get(scope.run, 0):
            self._raise_fence(scope.run, scope.generation)
        room = self._rooms[scope] = _Namespace()
        return room

    def _drop(self, operation: DropNamespace, number: int) -> KvDone:
        scope = operation.scope
        existed = self._rooms.pop(scope, None) is not None
        if scope.generation != LOBBY:
            self._raise_fence(scope.run, scope.generation + 1)
        return KvDone(number, self.founding, count=int(existed))

    def _raise_fence(self, run: str, generation: int) -> None:
        self._fences.pop(run, None)  # the newest fence goes last, so that the first is the one to forget
        self._fences[run] = generation
        while len(self._fences) > _MOST_FENCES:
            del self._fences[next(iter(self._fences))]

    # operations

    def _write(self, room: _Namespace, operation: Write, number: int) -> Result:
        match operation:
            case SetKey(key=key, value=value):
                denied = _no_room(room, operation.scope, [(key, value)])
                if denied is None:
                    room.put(key, value)
            case SetKeys(keys=keys, values=values):
                if len(keys) != len(values):
                    return _invalid(f"{len(keys)} keys come with {len(values)} values")
                denied = _no_room(room, operation.scope, zip(keys, values, strict=True))
                if denied is None:
                    for key, value in zip(keys, values, strict=True):
                        room.put(key, value)
            case AppendToKey(key=key, value=value):
                whole = room.values.get(key, b"") + value
                denied = _no_room(room, operation.scope, [(key, whole)])
                if denied is None:
                    room.put(key, whole)
            case AddToKey():
                return self._add(room, operation, number)
            case CompareAndSet():
                return self._compare_set(room, operation, number)
            case DeleteKey(key=key):
                old = room.values.pop(key, None)
                room.size -= 0 if old is None else _length(key) + len(old)
                return KvDone(number, self.founding, count=int(old is not None))
            case PushToQueue(key=key, value=value):
                denied = _no_room(room, operation.scope, [(key, value)], queue=True)
                if denied is None:
                    room.size += len(value) + (0 if key in room.queues else _length(key))
                    room.queues.setdefault(key, deque()).append(value)
            case PopFromQueue(key=key):
                return self._pop(room, key, number)
            case DropNamespace():
                raise AssertionError("a drop opens no scope")
            case _:
                assert_never(operation)
        return KvDone(number, self.founding) if denied is None else denied

    def _add(self, room: _Namespace, operation: AddToKey, number: int) -> Result:
        text = room.values.get(operation.key) or b"0"
        try:
            total = int(text[:_LONGEST_NUMBER]) + operation.amount
        except ValueError:
            return _invalid(f"key {operation.key!r} has {text[:40]!r}, which is no number to add to")
        if len(text) > _LONGEST_NUMBER or not -_LIMIT <= total < _LIMIT:
            return _invalid(f"key {operation.key!r} would leave the range of 64 bits")
        value = str(total).encode()
        denied = _no_room(room, operation.scope, [(operation.key, value)])
        if denied is not None:
            return denied
        room.put(operation.key, value)
        return KvDone(number, self.founding, count=total)

    def _compare_set(self, room: _Namespace, operation: CompareAndSet, number: int) -> Result:
        key, current = operation.key, room.values.get(operation.key)
        equal = (current or b"") == operation.expected
        seen = operation.desired if equal else operation.expected if current is None else current
        # The answer is remembered, so it takes room even if nothing is written.
        if seen and room.size + len(seen) > SCOPE_BYTES:
            return _full_scope(operation.scope)
        if not equal:
            return KvDone(number, self.founding, value=seen)
        denied = _no_room(room, operation.scope, [(key, operation.desired)])
        if denied is not None:
            return denied
        room.put(key, operation.desired)
        return KvDone(number, self.founding, value=operation.desired)

    def _pop(self, room: _Namespace, key: str, number: int) -> KvDone:
        queue = room.queues.get(key)
        if queue is None:
            return KvDone(number, self.founding, missing=(key,))
        value = queue.popleft()
        room.size -= len(value)
        if not queue:
            del room.queues[key]
            room.size -= _length(key)
        return KvDone(number, self.founding, value=value)

    def _read(self, operation: Read, number: int) -> Result:
        room = self._rooms.get(operation.scope) or _Namespace()
        match operation:
            case GetKey(key=key):
                value = room.values.get(key)
                missing = (key,) if value is None else ()
                return KvDone(number, self.founding, value=value, missing=missing)
            case GetKeys(keys=keys):
                lacking = _first_few(key for key in keys if key not in room.values)
                if lacking:
                    return KvDone(number, self.founding, missing=lacking)
                return KvDone(number, self.founding, values=_that_fit(room.values[key] for key in keys))
            case CheckKeys(keys=keys):
                lacking = _first_few(key for key in keys if not room.has(key))
                return KvDone(number, self.founding, missing=lacking)
            case CountResult():
                return KvDone(number, self.founding, count=len(room.values))
            case QueueLength(key=key):
                return KvDone(number, self.founding, count=len(room.queues.get(key, ())))
            case _:
                assert_never(operation)


_image_decoder = msgspec.msgpack.Decoder(_StoreImage)


def _length(key: str) -> int:
    return len(key.encode())


def _told(result: Result) -> int:
    return len(result.value or b"") if isinstance(result, KvDone) else 0


def _first_few(keys: Iterable[str]) -> tuple[str, ...]:
    few = []
    for key in keys:
        few.append(key)
        if len(few) >= _MOST_TOLD_MISSING:
            break
    return tuple(few)


def _that_fit(values: Iterable[bytes]) -> tuple[bytes, ...]:
    """As many as one answer can carry, but at least one."""
    taken: list[bytes] = []
    size = 0
    for value in values:
        size += len(value) + 8
        if taken and size > LARGEST_VALUE:
            break
        taken.append(value)
    return tuple(taken)


def _no_room(
    room: _Namespace, scope: Namespace, pairs: Iterable[tuple[str, bytes]], *, queue: bool = False
) -> KvDenied | None:
    """Why these cannot be written, all or none."""
    size, count = room.size, len(room.values) + len(room.queues)
    for key, value in pairs:
        length = _length(key)
        if length > LARGEST_KEY:
            return _invalid(f"a key has {length} bytes; it may have {LARGEST_KEY}")
        if len(value) > LARGEST_VALUE:
            return _invalid(f"key {key!r} would have {format_size(len(value))}; it may have 1 MiB")
        if queue:
            new = key not in room.queues
            size += len(value) + (length if new else 0)
        else:
            old = room.values.get(key)
            new = old is None
            size += len(value) + (length if old is None else -len(old))
        count += new
    if count > MOST_KEYS:
        return _full(f"{scope} has {MOST_KEYS} keys already")
    return _full_scope(scope) if size > SCOPE_BYTES and size > room.size else None


def _full_scope(scope: Namespace) -> KvDenied:
    return KvDenied(
        "full", f"{scope} holds {format_size(SCOPE_BYTES)} already", "Delete keys that nobody needs."
    )


def _full(message: str) -> KvDenied:
    return KvDenied("full", message, _USE_ANOTHER_RUN)


def _invalid(message: str) -> KvDenied:
    return KvDenied("invalid", message, "Correct the call; nothing was written.")
