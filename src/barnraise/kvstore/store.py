"""Bounded key-value store: a deterministic state machine that numbered operations change. Pure.

Replicas that apply the same operations in the same order hold the same state. So nothing here may depend on
a clock, on random numbers or on the iteration order of a set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Annotated, assert_never

import msgspec
from msgspec import Meta

from barnraise.agent_client.kv_messages import (
    LARGEST_KEY,
    LARGEST_VALUE,
    LOBBY,
    MOST_KEYS_AT_ONCE,
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
    ReadQueue,
    Result,
    SetKey,
    SetKeys,
    Write,
)
from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError
from barnraise.core.units import format_size

_MAX_NAMESPACES = 64
_MAX_FENCES = 4096
_MAX_DROPS = 256
_MAX_MISSING_REPORTED = 512
_INT64_LIMIT = 2**63
_MAX_DIGITS = 64

_FREE_NAMESPACES = "Stop runs that are no longer needed, or wait until idle namespaces are dropped."


class StoreRules(msgspec.Struct, frozen=True):
    """Limits of a store, and what becomes of its contents. They must be equal on all machines.

    ``is_durable``: the replicas are on disks. ``free_namespaces``, ``free_bytes``, ``shorten``: what a person
    can do about the limits. ``current_queue``: the key whose value names the only queue that takes values; if
    it is empty, every queue does. ``reopen``: what a person can do when a queue takes none any more.
    """

    noun: str = "store"
    is_durable: bool = False
    max_namespaces: int = _MAX_NAMESPACES
    max_namespace_bytes: int = 64 << 20
    max_bytes: int = 4 << 30
    max_value: int = LARGEST_VALUE
    max_keys: int = 100_000
    max_queue: int = 1 << 26
    max_clients: int = 10_000
    free_namespaces: str = _FREE_NAMESPACES
    free_bytes: str = "Delete keys that are no longer needed."
    shorten: str = "Correct the call; nothing was written."
    current_queue: str = ""
    reopen: str = ""

    @property
    def max_snapshot_bytes(self) -> int:
        """Return a limit for the encoded store, with room for names and for remembered writes."""
        return self.max_bytes + self.max_bytes // 4

    def label(self, scope: Namespace) -> str:
        """Return the words for a namespace in messages."""
        return f"{self.noun} {scope.run!r}" if self.is_durable else str(scope)


IN_MEMORY = StoreRules()
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
    scopes: Annotated[list[_NamespaceSnapshot], Meta(max_length=_MAX_NAMESPACES)]
    drops: Annotated[dict[bytes, _LastWrite], Meta(max_length=_MAX_DROPS)] = {}


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

    def __init__(self, founding: bytes, rules: StoreRules = IN_MEMORY) -> None:
        self.founding = founding
        self.rules = rules
        self._namespaces: dict[Namespace, _Namespace] = {}
        # Fencing: the oldest generation of each run that is still accepted.
        self._fences: dict[str, int] = {}
        # The last drops by client, which a namespace that is gone cannot remember.
        self._drops: dict[bytes, _LastWrite] = {}

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        return tuple(self._namespaces)

    def can_open(self, scope: Namespace) -> bool:
        """Return True if a write to this namespace would not exceed the number of namespaces."""
        return (
            scope in self._namespaces
            or len(self._namespaces) - len(self._older_generations(scope)) < self.rules.max_namespaces
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
        if last_write is None:
            last_write = self._drops.get(operation.client)
        if last_write is not None and operation.serial <= last_write.serial:
            if operation.serial == last_write.serial:
                return last_write.result
            return KvDenied(
                "invalid", "this write is older than the last one of the same client", "Send a new write."
            )
        if isinstance(operation, DropNamespace):
            return self._drop(operation, number)
        if isinstance(operation, PushToQueue) and self.rules.current_queue:
            # Such a push must not open the namespace again.
            current = None if space is None else space.values.get(self.rules.current_queue)
            if current != operation.key.encode():
                label = self.rules.label(operation.scope)
                reason = "was deleted, or the machines with its newest entries were removed"
                return KvDenied("stale", f"{label} {reason}; nothing was written", self.rules.reopen)
        if space is None:
            opened = self._open(operation.scope)
            if isinstance(opened, KvDenied):
                return opened
            space = opened
        if operation.client not in space.clients and len(space.clients) >= self.rules.max_clients:
            return self._full(
                f"{self.rules.label(operation.scope)} has {self.rules.max_clients} clients already"
            )
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
        return msgspec.msgpack.encode(_StoreSnapshot(self.founding, self._fences, scopes, self._drops))

    @classmethod
    def from_snapshot(cls, data: bytes, rules: StoreRules = IN_MEMORY) -> KeyValueStore:
        """Decode the bytes of `to_snapshot`; raise ProtocolError if they are malformed or too many."""
        snapshot = decode(_snapshot_decoder, data, "a snapshot of the store cannot be read")
        store = cls(snapshot.founding, rules)
        store._fences, store._drops = snapshot.fences, snapshot.drops
        for saved in snapshot.scopes:
            space = _Namespace()
            for key, value in saved.values.items():
                space.put(key, value)
            for key, items in saved.queues.items():
                space.queues[key] = deque(items)
                space.size += _length(key) + sum(map(len, items))
            for client, last_write in saved.clients.items():
                space.remember(client, last_write)
            keys = len(space.values) + len(space.queues)
            longest = max(map(len, space.queues.values()), default=0)
            too_many = keys > rules.max_keys or longest > rules.max_queue
            if space.size > 2 * rules.max_namespace_bytes or too_many:
                raise ProtocolError(
                    f"a snapshot of the store exceeds the limit of {rules.label(saved.scope)}"
                )
            store._namespaces[saved.scope] = space
        if len(store._namespaces) > rules.max_namespaces:
            raise ProtocolError(f"a snapshot of the store has {len(store._namespaces)} namespaces")
        return store

    # namespaces

    def _check_fence(self, operation: Operation) -> KvDenied | None:
        if operation.founding and operation.founding != self.founding:
            return KvDenied(
                "lost",
                f"the {self.rules.noun} lost its contents, because too many machines that held it stopped at "
                "once",
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
            return self._full(
                f"there are {self.rules.max_namespaces} namespaces already; cannot add "
                f"{self.rules.label(scope)}"
            )
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
        done = KvDone(number, self.founding, count=int(existed))
        self._drops.pop(operation.client, None)
        self._drops[operation.client] = _LastWrite(operation.serial, done)
        while len(self._drops) > _MAX_DROPS:
            del self._drops[next(iter(self._drops))]
        return done

    def _raise_fence(self, run: str, generation: int) -> None:
        self._fences.pop(run, None)  # the newest fence goes last; the first is dropped first
        self._fences[run] = generation
        while len(self._fences) > _MAX_FENCES:
            del self._fences[next(iter(self._fences))]

    # operations

    def _write(self, space: _Namespace, operation: Write, number: int) -> Result:
        match operation:
            case SetKey(key=key, value=value):
                denied = self._check_limits(space, operation.scope, [(key, value)])
                if denied is None:
                    space.put(key, value)
            case SetKeys(keys=keys, values=values):
                if len(keys) != len(values):
                    return _invalid(f"{len(keys)} keys were given with {len(values)} values")
                denied = self._check_limits(space, operation.scope, zip(keys, values, strict=True))
                if denied is None:
                    for key, value in zip(keys, values, strict=True):
                        space.put(key, value)
            case AppendToKey(key=key, value=value):
                whole = space.values.get(key, b"") + value
                denied = self._check_limits(space, operation.scope, [(key, whole)])
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
                denied = self._check_limits(space, operation.scope, [(key, value)], queue=True)
                if len(space.queues.get(key, ())) >= self.rules.max_queue:
                    denied = self._full_namespace(operation.scope, f"{self.rules.max_queue} entries")
                if denied is None:
                    space.size += len(value) + (0 if key in space.queues else _length(key))
                    queue = space.queues.setdefault(key, deque())
                    queue.append(value)
                    return KvDone(number, self.founding, count=len(queue))
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
        denied = self._check_limits(space, operation.scope, [(operation.key, value)])
        if denied is not None:
            return denied
        space.put(operation.key, value)
        return KvDone(number, self.founding, count=total)

    def _compare_set(self, space: _Namespace, operation: CompareAndSet, number: int) -> Result:
        key, current = operation.key, space.values.get(operation.key)
        equal = (current or b"") == operation.expected
        seen = operation.desired if equal else operation.expected if current is None else current
        # The answer is kept for retries, so it needs space even if nothing is written.
        if seen and space.size + len(seen) > self.rules.max_namespace_bytes:
            return self._full_namespace(operation.scope)
        if not equal:
            return KvDone(number, self.founding, value=seen)
        denied = self._check_limits(space, operation.scope, [(key, operation.desired)])
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
            case ReadQueue(key=key, start=start):
                queue = space.queues.get(key, ())
                # An index of a deque costs time in its middle, so the values before it are skipped.
                values = islice(queue, min(start, len(queue)), None)
                return KvDone(number, self.founding, count=len(queue), values=_fit_into_reply(values))
            case _:
                assert_never(operation)

    # limits

    def _check_limits(
        self, space: _Namespace, scope: Namespace, pairs: Iterable[tuple[str, bytes]], *, queue: bool = False
    ) -> KvDenied | None:
        """Return the limit that these writes would exceed; None if all of them fit."""
        rules = self.rules
        size, count = space.size, len(space.values) + len(space.queues)
        for key, value in pairs:
            length = _length(key)
            if length > LARGEST_KEY:
                return _invalid(f"a key has {length} bytes; it may have {LARGEST_KEY}")
            if len(value) > rules.max_value:
                return self._too_large(scope, key, len(value))
            if queue:
                new = key not in space.queues
                size += len(value) + (length if new else 0)
            else:
                old = space.values.get(key)
                new = old is None
                size += len(value) + (length if old is None else -len(old))
            count += new
        if count > rules.max_keys:
            return self._full(f"{rules.label(scope)} has {rules.max_keys} keys already")
        if size > rules.max_namespace_bytes and size > space.size:
            return self._full_namespace(scope)
        used = sum(other.size for other in self._namespaces.values()) - space.size
        if used + size > rules.max_bytes and size > space.size:
            return KvDenied(
                "full",
                f"the {rules.noun}s of this cluster would exceed {format_size(rules.max_bytes)} together",
                rules.free_bytes,
            )
        return None

    def _too_large(self, scope: Namespace, key: str, size: int) -> KvDenied:
        rules = self.rules
        what = f"an entry of {rules.label(scope)}" if rules.is_durable else f"key {key!r}"
        limit = format_size(rules.max_value) if rules.is_durable else "1 MiB"
        return KvDenied(
            "invalid", f"{what} would have {format_size(size)}; it may have {limit}", rules.shorten
        )

    def _full_namespace(self, scope: Namespace, limit: str = "") -> KvDenied:
        limit = limit or format_size(self.rules.max_namespace_bytes)
        return KvDenied("full", f"{self.rules.label(scope)} already holds {limit}", self.rules.free_bytes)

    def _full(self, message: str) -> KvDenied:
        return KvDenied("full", message, self.rules.free_namespaces)


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
        if included and (size > LARGEST_VALUE or len(included) >= MOST_KEYS_AT_ONCE):
            break
        included.append(value)
    return tuple(included)


def _invalid(message: str) -> KvDenied:
    return KvDenied("invalid", message, "Correct the call; nothing was written.")
