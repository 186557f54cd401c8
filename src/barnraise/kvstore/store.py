"""Bounded key-value store: a deterministic state machine that numbered operations change. Pure.

Replicas that apply the same operations in the same order hold the same state. So nothing here may depend on
a clock, on random numbers or on the iteration order of a set.
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

MAX_NAMESPACES = 64
MAX_KEYS = 100_000
MAX_CLIENTS = 10_000
MAX_NAMESPACE_BYTES = 64 << 20
_MAX_FENCES = 4096
_MAX_MISSING_REPORTED = 512
_INT64_LIMIT = 2**63
_MAX_DIGITS = 64

_FREE_NAMESPACES = "Stop runs that are no longer needed, or wait until idle namespaces are dropped."
_TOO_LATE = "Stop this process: the run was restarted without it."


class _LastWrite(msgspec.Struct, frozen=True, array_like=True):
    """Last write of a client and its result, kept to recognise a retry."""

    serial: int
    result: Result


class _NamespaceSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """One namespace as a snapshot encodes it."""

    scope: Namespace
    values: dict[str, bytes]
    queues: dict[str, list[bytes]]
    clients: dict[bytes, _LastWrite]


class _StoreSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """The whole store as a snapshot encodes it."""

    founding: bytes
    fences: Annotated[dict[str, int], Meta(max_length=_MAX_FENCES)]
    scopes: Annotated[list[_NamespaceSnapshot], Meta(max_length=MAX_NAMESPACES)]


class _Namespace:
    """Keys, queues and clients of one namespace."""

    __slots__ = ("clients", "queues", "size", "values")

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.clients: dict[bytes, _LastWrite] = {}
        self.size = 0

    def has(self, key: str) -> bool:
        return key in self.values or key in self.queues

    def put(self, key: str, value: bytes) -> None:
        """Set a key and account for its size."""
        old = self.values.get(key)
        self.size += len(value) + (_length(key) if old is None else -len(old))
        self.values[key] = value

    def remember(self, client: bytes, last_write: _LastWrite) -> None:
        """Keep the last write of a client."""
        old = self.clients.get(client)
        self.size += _result_bytes(last_write.result) - (0 if old is None else _result_bytes(old.result))
        self.clients[client] = last_write


class KeyValueStore:
    """Key-value store with one namespace for each generation of a run.

    ``founding`` identifies the history of the store. A store that lost its contents starts a new history.
    """

    def __init__(self, founding: bytes) -> None:
        self.founding = founding
        self._namespaces: dict[Namespace, _Namespace] = {}
        # Fencing: the oldest generation of each run that is still accepted.
        self._fences: dict[str, int] = {}

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        return tuple(self._namespaces)

    def can_open(self, scope: Namespace) -> bool:
        """Return True if a write to this namespace would not exceed the number of namespaces."""
        return (
            scope in self._namespaces
            or len(self._namespaces) - len(self._older_generations(scope)) < MAX_NAMESPACES
        )

    def has(self, scope: Namespace, key: str) -> bool:
        """Return True if the namespace has a value or a queue of this key."""
        space = self._namespaces.get(scope)
        return space is not None and space.has(key)

    def has_value(self, scope: Namespace, key: str) -> bool:
        """Return True if the namespace has a value of this key; queues do not count."""
        space = self._namespaces.get(scope)
        return space is not None and key in space.values

    def apply(self, operation: Operation, number: int) -> Result:
        """Apply an operation and return its result; a repeated write takes effect once."""
        denied = self._check_fence(operation)
        if denied is not None:
            return denied
        if not isinstance(operation, WRITES):
            return self._read(operation, number)
        space = self._namespaces.get(operation.scope)
        last_write = None if space is None else space.clients.get(operation.client)
        if last_write is not None and operation.serial <= last_write.serial:
            if operation.serial == last_write.serial:
                return last_write.result
            return KvDenied(
                "invalid", "this write is older than the last one of the same client", "Send a new write."
            )
        if isinstance(operation, DropNamespace):
            return self._drop(operation, number)
        if space is None:
            opened = self._open(operation.scope)
            if isinstance(opened, KvDenied):
                return opened
            space = opened
        if operation.client not in space.clients and len(space.clients) >= MAX_CLIENTS:
            return _full(f"{operation.scope} has {MAX_CLIENTS} clients already")
        result = self._write(space, operation, number)
        space.remember(operation.client, _LastWrite(operation.serial, result))
        return result

    # snapshots

    def to_snapshot(self) -> bytes:
        """Encode the whole store as bytes."""
        scopes = [
            _NamespaceSnapshot(
                scope, space.values, {key: list(items) for key, items in space.queues.items()}, space.clients
            )
            for scope, space in self._namespaces.items()
        ]
        return msgspec.msgpack.encode(_StoreSnapshot(self.founding, self._fences, scopes))

    @classmethod
    def from_snapshot(cls, data: bytes) -> KeyValueStore:
        """Decode the bytes of `to_snapshot`; raise ProtocolError if they are malformed."""
        snapshot = decode(_snapshot_decoder, data, "a snapshot of the store cannot be read")
        store = cls(snapshot.founding)
        store._fences = snapshot.fences
        for saved in snapshot.scopes:
            space = _Namespace()
            for key, value in saved.values.items():
                space.put(key, value)
            for key, items in saved.queues.items():
                space.queues[key] = deque(items)
                space.size += _length(key) + sum(map(len, items))
            for client, last_write in saved.clients.items():
                space.remember(client, last_write)
            if space.size > 2 * MAX_NAMESPACE_BYTES or len(space.values) + len(space.queues) > MAX_KEYS:
                raise ProtocolError(f"a snapshot of the store exceeds the limit of {saved.scope}")
            store._namespaces[saved.scope] = space
        return store

    # namespaces

    def _check_fence(self, operation: Operation) -> KvDenied | None:
        if operation.founding and operation.founding != self.founding:
            return KvDenied(
                "lost",
                "the store lost its contents, because too many machines that held it stopped at once",
                "Start the run again; its earlier keys are gone.",
            )
        scope = operation.scope
        newest = self._fences.get(scope.run, 0)
        if LOBBY < scope.generation < newest:
            return KvDenied("stale", f"{scope} has ended; the run is at start {newest} or later", _TOO_LATE)
        return None

    def _older_generations(self, scope: Namespace) -> list[Namespace]:
        if scope.generation == LOBBY:
            return []
        return [
            other
            for other in self._namespaces
            if other.run == scope.run and LOBBY < other.generation < scope.generation
        ]

    def _open(self, scope: Namespace) -> _Namespace | KvDenied:
        if not self.can_open(scope):
            return _full(f"the store has {MAX_NAMESPACES} namespaces already; cannot add {scope}")
        for other in self._older_generations(scope):
            del self._namespaces[other]
        if scope.generation > self._fences.get(scope.run, 0):
            self._raise_fence(scope.run, scope.generation)
        space = self._namespaces[scope] = _Namespace()
        return space

    def _drop(self, operation: DropNamespace, number: int) -> KvDone:
        scope = operation.scope
        existed = self._namespaces.pop(scope, None) is not None
        if scope.generation != LOBBY:
            self._raise_fence(scope.run, scope.generation + 1)
        return KvDone(number, self.founding, count=int(existed))

    def _raise_fence(self, run: str, generation: int) -> None:
        self._fences.pop(run, None)  # the newest fence goes last; the first is dropped first
        self._fences[run] = generation
        while len(self._fences) > _MAX_FENCES:
            del self._fences[next(iter(self._fences))]

    # operations

    def _write(self, space: _Namespace, operation: Write, number: int) -> Result:
        match operation:
            case SetKey(key=key, value=value):
                denied = _check_limits(space, operation.scope, [(key, value)])
                if denied is None:
                    space.put(key, value)
            case SetKeys(keys=keys, values=values):
                if len(keys) != len(values):
                    return _invalid(f"{len(keys)} keys were given with {len(values)} values")
                denied = _check_limits(space, operation.scope, zip(keys, values, strict=True))
                if denied is None:
                    for key, value in zip(keys, values, strict=True):
                        space.put(key, value)
            case AppendToKey(key=key, value=value):
                whole = space.values.get(key, b"") + value
                denied = _check_limits(space, operation.scope, [(key, whole)])
                if denied is None:
                    space.put(key, whole)
            case AddToKey():
                return self._add(space, operation, number)
            case CompareAndSet():
                return self._compare_set(space, operation, number)
            case DeleteKey(key=key):
                old = space.values.pop(key, None)
                space.size -= 0 if old is None else _length(key) + len(old)
                return KvDone(number, self.founding, count=int(old is not None))
            case PushToQueue(key=key, value=value):
                denied = _check_limits(space, operation.scope, [(key, value)], queue=True)
                if denied is None:
                    space.size += len(value) + (0 if key in space.queues else _length(key))
                    space.queues.setdefault(key, deque()).append(value)
            case PopFromQueue(key=key):
                return self._pop(space, key, number)
            case DropNamespace():
                raise AssertionError("a drop does not open a namespace")
            case _:
                assert_never(operation)
        return KvDone(number, self.founding) if denied is None else denied

    def _add(self, space: _Namespace, operation: AddToKey, number: int) -> Result:
        text = space.values.get(operation.key) or b"0"
        try:
            total = int(text[:_MAX_DIGITS]) + operation.amount
        except ValueError:
            return _invalid(f"key {operation.key!r} holds {text[:40]!r}, which is not a number")
        if len(text) > _MAX_DIGITS or not -_INT64_LIMIT <= total < _INT64_LIMIT:
            return _invalid(f"key {operation.key!r} would exceed 64 bits")
        value = str(total).encode()
        denied = _check_limits(space, operation.scope, [(operation.key, value)])
        if denied is not None:
            return denied
        space.put(operation.key, value)
        return KvDone(number, self.founding, count=total)

    def _compare_set(self, space: _Namespace, operation: CompareAndSet, number: int) -> Result:
        key, current = operation.key, space.values.get(operation.key)
        equal = (current or b"") == operation.expected
        seen = operation.desired if equal else operation.expected if current is None else current
        # The answer is kept for retries, so it needs space even if nothing is written.
        if seen and space.size + len(seen) > MAX_NAMESPACE_BYTES:
            return _full_namespace(operation.scope)
        if not equal:
            return KvDone(number, self.founding, value=seen)
        denied = _check_limits(space, operation.scope, [(key, operation.desired)])
        if denied is not None:
            return denied
        space.put(key, operation.desired)
        return KvDone(number, self.founding, value=operation.desired)

    def _pop(self, space: _Namespace, key: str, number: int) -> KvDone:
        queue = space.queues.get(key)
        if queue is None:
            return KvDone(number, self.founding, missing=(key,))
        value = queue.popleft()
        space.size -= len(value)
        if not queue:
            del space.queues[key]
            space.size -= _length(key)
        return KvDone(number, self.founding, value=value)

    def _read(self, operation: Read, number: int) -> Result:
        space = self._namespaces.get(operation.scope) or _Namespace()
        match operation:
            case GetKey(key=key):
                value = space.values.get(key)
                missing = (key,) if value is None else ()
                return KvDone(number, self.founding, value=value, missing=missing)
            case GetKeys(keys=keys):
                lacking = _first_missing(key for key in keys if key not in space.values)
                if lacking:
                    return KvDone(number, self.founding, missing=lacking)
                return KvDone(
                    number, self.founding, values=_fit_into_reply(space.values[key] for key in keys)
                )
            case CheckKeys(keys=keys):
                lacking = _first_missing(key for key in keys if not space.has(key))
                return KvDone(number, self.founding, missing=lacking)
            case CountResult():
                return KvDone(number, self.founding, count=len(space.values))
            case QueueLength(key=key):
                return KvDone(number, self.founding, count=len(space.queues.get(key, ())))
            case _:
                assert_never(operation)


_snapshot_decoder = msgspec.msgpack.Decoder(_StoreSnapshot)


def _length(key: str) -> int:
    return len(key.encode())


def _result_bytes(result: Result) -> int:
    return len(result.value or b"") if isinstance(result, KvDone) else 0


def _first_missing(keys: Iterable[str]) -> tuple[str, ...]:
    missing = []
    for key in keys:
        missing.append(key)
        if len(missing) >= _MAX_MISSING_REPORTED:
            break
    return tuple(missing)


def _fit_into_reply(values: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return as many values as one reply can carry, but at least one."""
    included: list[bytes] = []
    size = 0
    for value in values:
        size += len(value) + 8
        if included and size > LARGEST_VALUE:
            break
        included.append(value)
    return tuple(included)


def _check_limits(
    space: _Namespace, scope: Namespace, pairs: Iterable[tuple[str, bytes]], *, queue: bool = False
) -> KvDenied | None:
    """Return the limit that these writes would exceed; None if all of them fit."""
    size, count = space.size, len(space.values) + len(space.queues)
    for key, value in pairs:
        length = _length(key)
        if length > LARGEST_KEY:
            return _invalid(f"a key has {length} bytes; it may have {LARGEST_KEY}")
        if len(value) > LARGEST_VALUE:
            return _invalid(f"key {key!r} would have {format_size(len(value))}; it may have 1 MiB")
        if queue:
            new = key not in space.queues
            size += len(value) + (length if new else 0)
        else:
            old = space.values.get(key)
            new = old is None
            size += len(value) + (length if old is None else -len(old))
        count += new
    if count > MAX_KEYS:
        return _full(f"{scope} has {MAX_KEYS} keys already")
    return _full_namespace(scope) if size > MAX_NAMESPACE_BYTES and size > space.size else None


def _full_namespace(scope: Namespace) -> KvDenied:
    return KvDenied(
        "full",
        f"{scope} already holds {format_size(MAX_NAMESPACE_BYTES)}",
        "Delete keys that are no longer needed.",
    )


def _full(message: str) -> KvDenied:
    return KvDenied("full", message, _FREE_NAMESPACES)


def _invalid(message: str) -> KvDenied:
    return KvDenied("invalid", message, "Correct the call; nothing was written.")
