"""What this machine's clients wait for: operations under way, and keys that somebody else will set. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from barnraise.agent_client.kv_messages import (
    CheckKeys,
    GetKeys,
    KvDenied,
    KvDone,
    Namespace,
    Operation,
    Result,
    WatchKey,
)
from barnraise.kvstore.messages import ReplicaAnswer
from barnraise.kvstore.store import KeyValueStore

MOST_PENDING = 20_000
RETRY_S = 0.5
_LOOK_S = 1.0
_LINGER_S = 1.0


class _Pending:
    """One operation that the primary has to answer; a watch makes reads of its own."""

    __slots__ = ("began", "deadline", "operation", "sent", "ticket", "watch")

    def __init__(
        self,
        operation: Operation,
        ticket: object,
        deadline: float,
        now: float,
        watch: _Watching | None = None,
    ) -> None:
        self.operation = operation
        self.ticket = ticket
        self.deadline = deadline
        self.watch = watch
        self.began = self.sent = now


class _Watching:
    __slots__ = ("asking", "deadline", "last", "looked", "operation", "place", "ticket")

    def __init__(self, operation: WatchKey, ticket: object, deadline: float) -> None:
        self.operation = operation
        self.ticket = ticket
        self.deadline = deadline
        self.last: KvDone | None = None  # what the primary said last
        self.asking = False
        self.looked = -1e9
        self.place = 0  # the first key that the copy here does not have

    def read(self) -> Operation:
        watch = self.operation
        kind = GetKeys if watch.fetch else CheckKeys
        return kind(watch.scope, watch.client, watch.serial, watch.founding, watch.keys)

    def is_promising(self, board: KeyValueStore) -> bool:
        """Whether the copy here has all the keys; only the primary can say so for sure."""
        keys, scope = self.operation.keys, self.operation.scope
        has = board.has_value if self.operation.fetch else board.has
        while self.place < len(keys) and has(scope, keys[self.place]):
            self.place += 1
        return self.place == len(keys)


class ToSubmit(NamedTuple):
    request: int
    operation: Operation


class PendingRequests:
    """Every one of them is answered once: by the primary, or at its deadline."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._watches: dict[Namespace, list[_Watching]] = {}
        self._fresh: list[int] = []
        self._next = 0

    def linger(self, now: float) -> bool:
        """Whether any has been waiting for a while."""
        oldest = next(iter(self._pending.values()), None)
        return oldest is not None and now - oldest.began > _LINGER_S

    def add(
        self, operation: Operation | WatchKey, ticket: object, deadline: float, now: float
    ) -> ReplicaAnswer | None:
        """An answer only if it cannot be taken at all."""
        if len(self._pending) >= MOST_PENDING:
            return ReplicaAnswer(
                ticket, KvDenied("late", "too many questions wait already", "Ask again later.")
            )
        if isinstance(operation, WatchKey):
            watch = _Watching(operation, ticket, deadline)
            self._watches.setdefault(operation.scope, []).append(watch)
            self._ask(watch, now)
        else:
            self._put(_Pending(operation, ticket, deadline, now))
        return None

    def forget(self, ticket: object) -> None:
        """Nobody waits for it any more; what is under way may still happen."""
        for request in [number for number, one in self._pending.items() if one.ticket == ticket]:
            del self._pending[request]
        for watch in [one for each in self._watches.values() for one in each if one.ticket == ticket]:
            self._leave(watch)

    def unsent(self) -> Iterator[ToSubmit]:
        """What the primary has not been sent yet."""
        fresh, self._fresh = self._fresh, []
        return (
            ToSubmit(request, self._pending[request].operation)
            for request in fresh
            if request in self._pending
        )

    def unanswered(self, now: float, older_than_s: float = RETRY_S) -> Iterator[ToSubmit]:
        """What the primary should be sent again: a message may be lost, or another one has taken over."""
        for request, one in self._pending.items():
            if now - one.sent >= older_than_s:
                one.sent = now
                yield ToSubmit(request, one.operation)

    def answered(self, request: int, result: Result) -> ReplicaAnswer | None:
        one = self._pending.pop(request, None)
        if one is None:
            return None
        if one.watch is None:
            return ReplicaAnswer(one.ticket, result)
        one.watch.asking = False
        if isinstance(result, KvDone) and result.missing:
            one.watch.last = result
            return None
        self._leave(one.watch)
        return ReplicaAnswer(one.ticket, result)

    def changed(self, board: KeyValueStore, scope: Namespace | None, now: float) -> None:
        """The copy here has changed, in one scope or altogether: a watch may have its keys now."""
        each = self._watches.values() if scope is None else (self._watches.get(scope, ()),)
        for watch in [one for some in each for one in some if not one.asking]:
            if watch.is_promising(board):
                self._ask(watch, now)

    def tick(self, now: float, why: str) -> list[ReplicaAnswer]:
        """Look again for watches whose news may have been missed; end what is over its deadline."""
        answers = []
        for request in [number for number, one in self._pending.items() if now >= one.deadline]:
            one = self._pending.pop(request)
            if one.watch is None:
                answers.append(ReplicaAnswer(one.ticket, _late(why)))
            else:
                one.watch.asking = False
        for watch in [one for each in self._watches.values() for one in each]:
            if now >= watch.deadline:
                self._leave(watch)
                answers.append(ReplicaAnswer(watch.ticket, _late(why) if watch.last is None else watch.last))
            elif not watch.asking and now - watch.looked > _LOOK_S:
                self._ask(watch, now)
        return answers

    def _ask(self, watch: _Watching, now: float) -> None:
        watch.asking, watch.looked, watch.place = True, now, 0
        self._put(_Pending(watch.read(), watch.ticket, watch.deadline, now, watch))

    def _put(self, one: _Pending) -> None:
        self._next += 1
        self._pending[self._next] = one
        self._fresh.append(self._next)

    def _leave(self, watch: _Watching) -> None:
        scope = watch.operation.scope
        rest = [one for one in self._watches.get(scope, ()) if one is not watch]
        if rest:
            self._watches[scope] = rest
        else:
            self._watches.pop(scope, None)


def _late(why: str) -> KvDenied:
    return KvDenied("late", why, "See `barnraise status`; start the machines that it names as missing.")
