"""Pending requests of this machine's clients: operations in flight, and watches of keys. Pure."""

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

MAX_PENDING = 20_000
RETRY_S = 0.5
_RECHECK_S = 1.0
_SLOW_S = 1.0


class _Pending:
    """Operation that waits for the primary's answer; ``watch`` is set for the reads of a watch."""

    __slots__ = ("deadline", "operation", "sent_at", "started_at", "ticket", "watch")

    def __init__(
        self,
        operation: Operation,
        ticket: object,
        deadline: float,
        now: float,
        watch: _Watch | None = None,
    ) -> None:
        self.operation = operation
        self.ticket = ticket
        self.deadline = deadline
        self.watch = watch
        self.started_at = self.sent_at = now


class _Watch:
    """Client that waits until a set of keys exists."""

    __slots__ = ("checked_at", "deadline", "is_asking", "last_result", "operation", "present", "ticket")

    def __init__(self, operation: WatchKey, ticket: object, deadline: float) -> None:
        self.operation = operation
        self.ticket = ticket
        self.deadline = deadline
        self.last_result: KvDone | None = None  # the latest answer of the primary
        self.is_asking = False
        self.checked_at = -1e9
        self.present = 0  # how many leading keys the local replica has

    def to_read(self) -> Operation:
        """Return the read that asks the primary for all keys of the watch."""
        watch = self.operation
        kind = GetKeys if watch.fetch else CheckKeys
        return kind(watch.scope, watch.client, watch.serial, watch.founding, watch.keys)

    def is_satisfied_by(self, store: KeyValueStore) -> bool:
        """Return True if the local replica has all keys; only the primary's answer is authoritative."""
        keys, scope = self.operation.keys, self.operation.scope
        has = store.has_value if self.operation.fetch else store.has
        while self.present < len(keys) and has(scope, keys[self.present]):
            self.present += 1
        return self.present == len(keys)


class ToSubmit(NamedTuple):
    """Request that is to be sent to the primary."""

    request: int
    operation: Operation


class PendingRequests:
    """Requests of local clients; each is answered once, by the primary or at its deadline."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._watches: dict[Namespace, list[_Watch]] = {}
        self._unsent_requests: list[int] = []
        self._next_request = 0

    def has_slow(self, now: float) -> bool:
        """Return True if the oldest request has been waiting for a while."""
        oldest = next(iter(self._pending.values()), None)
        return oldest is not None and now - oldest.started_at > _SLOW_S

    def add(
        self, operation: Operation | WatchKey, ticket: object, deadline: float, now: float
    ) -> ReplicaAnswer | None:
        """Add a request; return an answer only if the request is rejected at once."""
        if len(self._pending) >= MAX_PENDING:
            return ReplicaAnswer(ticket, KvDenied("late", "too many requests are waiting", "Retry later."))
        if isinstance(operation, WatchKey):
            watch = _Watch(operation, ticket, deadline)
            self._watches.setdefault(operation.scope, []).append(watch)
            self._send_read(watch, now)
        else:
            self._add_pending(_Pending(operation, ticket, deadline, now))
        return None

    def cancel(self, ticket: object) -> None:
        """Drop a request that no client waits for; an operation in flight may still take effect."""
        for request in [number for number, pending in self._pending.items() if pending.ticket == ticket]:
            del self._pending[request]
        for watch in [item for group in self._watches.values() for item in group if item.ticket == ticket]:
            self._remove_watch(watch)

    def unsent(self) -> Iterator[ToSubmit]:
        """Return the requests that have not been sent to the primary yet, and mark them sent."""
        requests, self._unsent_requests = self._unsent_requests, []
        return (
            ToSubmit(request, self._pending[request].operation)
            for request in requests
            if request in self._pending
        )

    def unanswered(self, now: float, older_than_s: float = RETRY_S) -> Iterator[ToSubmit]:
        """Return the requests to send again, because a message was lost or the primary has changed."""
        for request, pending in self._pending.items():
            if now - pending.sent_at >= older_than_s:
                pending.sent_at = now
                yield ToSubmit(request, pending.operation)

    def on_result(self, request: int, result: Result) -> ReplicaAnswer | None:
        """Return the answer for the client; None if a watch has to go on waiting."""
        pending = self._pending.pop(request, None)
        if pending is None:
            return None
        if pending.watch is None:
            return ReplicaAnswer(pending.ticket, result)
        pending.watch.is_asking = False
        if isinstance(result, KvDone) and result.missing:
            pending.watch.last_result = result
            return None
        self._remove_watch(pending.watch)
        return ReplicaAnswer(pending.ticket, result)

    def recheck_watches(self, store: KeyValueStore, scope: Namespace | None, now: float) -> None:
        """Check the watches of one namespace, or of all, after the local replica has changed."""
        groups = self._watches.values() if scope is None else (self._watches.get(scope, ()),)
        for watch in [item for group in groups for item in group if not item.is_asking]:
            if watch.is_satisfied_by(store):
                self._send_read(watch, now)

    def tick(self, now: float, why: str) -> list[ReplicaAnswer]:
        """Check watches again that may have missed a change, and answer requests that have timed out."""
        answers = []
        for request in [number for number, item in self._pending.items() if now >= item.deadline]:
            pending = self._pending.pop(request)
            if pending.watch is None:
                answers.append(ReplicaAnswer(pending.ticket, _timed_out(why)))
            else:
                pending.watch.is_asking = False
        for watch in [item for group in self._watches.values() for item in group]:
            if now >= watch.deadline:
                self._remove_watch(watch)
                answers.append(
                    ReplicaAnswer(
                        watch.ticket, _timed_out(why) if watch.last_result is None else watch.last_result
                    )
                )
            elif not watch.is_asking and now - watch.checked_at > _RECHECK_S:
                self._send_read(watch, now)
        return answers

    def _send_read(self, watch: _Watch, now: float) -> None:
        watch.is_asking, watch.checked_at, watch.present = True, now, 0
        self._add_pending(_Pending(watch.to_read(), watch.ticket, watch.deadline, now, watch))

    def _add_pending(self, pending: _Pending) -> None:
        self._next_request += 1
        self._pending[self._next_request] = pending
        self._unsent_requests.append(self._next_request)

    def _remove_watch(self, watch: _Watch) -> None:
        scope = watch.operation.scope
        rest = [other for other in self._watches.get(scope, ()) if other is not watch]
        if rest:
            self._watches[scope] = rest
        else:
            self._watches.pop(scope, None)


def _timed_out(why: str) -> KvDenied:
    return KvDenied("late", why, "See `barnraise status`; start the machines that it names as missing.")
