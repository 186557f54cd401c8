"""Primary of one view: numbers operations, appends them to the backups' logs, answers on commit. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from barnraise.agent_client.kv_messages import DropNamespace, Namespace, Operation, Result
from barnraise.kvstore.messages import AppendAck, AppendEntry, IsQuorum, ReplicaSend, ReplicaView, ViewBallot
from barnraise.kvstore.snapshot import ReplicaLog

RETRY_S = 0.25
IDLE_NAMESPACE_S = 6 * 3600.0
MAX_UNCOMMITTED = 20_000


class RequestOrigin(NamedTuple):
    """Identity of a pending client request: node, incarnation and request number."""

    node: bytes
    incarnation: bytes
    request: int


class DueReply(NamedTuple):
    """Result of a committed operation, to be sent to its origin."""

    origin: RequestOrigin
    result: Result


class _Backup:
    """Replication state of one backup, as the primary knows it."""

    __slots__ = ("awaits_ack", "follows", "is_position_known", "op_number", "sent_at")

    def __init__(self) -> None:
        self.op_number = 0
        self.is_position_known = False  # False while the backup fetches a snapshot
        self.follows = False
        self.awaits_ack = False  # of the latest append
        self.sent_at = 0.0


class Primary:
    """Primary of one view under one ballot. ``log`` is its own log, which is complete."""

    def __init__(self, me: bytes, view: ReplicaView, ballot: ViewBallot, log: ReplicaLog, now: float) -> None:
        self.ballot = ballot
        self.commit_number = -1  # until a quorum follows
        self._me = me
        self._view = view
        self._log = log
        self._base_ballot, self._base_op_number = log.log_ballot, log.op_number
        log.log_ballot = ballot
        self._backups = {node: _Backup() for node in view.members if node != me}
        self._uncommitted: deque[tuple[int, RequestOrigin, Result]] = deque()
        self._open_requests: set[RequestOrigin] = set()
        self._last_used: dict[Namespace, float] = dict.fromkeys(log.store.namespaces, now)

    def start(self, now: float, *, is_empty: bool) -> list[ReplicaSend]:
        """Send a first append to every backup.

        ``is_empty``: the store starts empty, so that every backup must fetch a snapshot.
        """
        if is_empty:
            self._base_ballot = self.ballot
        return [
            send
            for node, backup in self._backups.items()
            for send in self._send_append(node, backup, now, force=True)
        ]

    def submit(self, operation: Operation, origin: RequestOrigin, now: float) -> list[ReplicaSend]:
        """Append an operation to the log, unless the same request is already in flight."""
        if origin in self._open_requests or len(self._uncommitted) >= MAX_UNCOMMITTED:
            return []
        self._drop_idle_namespace(operation.scope, now)
        self._mark_used(operation.scope, now)
        result = self._log.apply(operation)
        self._open_requests.add(origin)
        self._uncommitted.append((self._log.op_number, origin, result))
        return list(self._replicate(now))

    def on_ack(self, node: bytes, message: AppendAck, now: float) -> list[ReplicaSend]:
        """Record how far a backup is, and send the operations that it lacks."""
        backup = self._backups.get(node)
        if backup is None or message.ballot != self.ballot or (backup.follows and not message.follows):
            return []
        backup.awaits_ack = False
        backup.is_position_known = not message.is_fetching
        backup.op_number = max(backup.op_number, message.op_number) if backup.follows else message.op_number
        backup.follows = message.follows
        return list(self._send_append(node, backup, now))

    def on_resend_request(self, node: bytes, now: float) -> list[ReplicaSend]:
        """Treat the backup as empty: it has no state of this view, despite earlier acknowledgements."""
        if node not in self._backups:
            return []
        backup = self._backups[node] = _Backup()
        return list(self._send_append(node, backup, now, force=True))

    def tick(self, now: float) -> list[ReplicaSend]:
        """Send the appends again that were not acknowledged in time."""
        sends: list[ReplicaSend] = []
        for node, backup in self._backups.items():
            behind = not backup.follows or backup.op_number < self._log.op_number
            if behind and now - backup.sent_at > RETRY_S:
                backup.awaits_ack = False
                sends += self._send_append(node, backup, now, force=True)
        return sends

    def take_committed(self, is_quorum: IsQuorum) -> list[DueReply]:
        """Advance the commit number, and return the replies that are due."""
        if self.commit_number < self._log.op_number:
            self.commit_number = max(self.commit_number, self._quorum_op_number(is_quorum))
        ready = []
        while self._uncommitted and self._uncommitted[0][0] <= self.commit_number:
            _, origin, result = self._uncommitted.popleft()
            self._open_requests.discard(origin)
            ready.append(DueReply(origin, result))
        return ready

    def lagging_voters(self) -> tuple[bytes, ...]:
        """Return the voters that the oldest uncommitted operation waits for."""
        if not self._uncommitted:
            return ()
        return tuple(
            node
            for node, backup in self._backups.items()
            if node in self._view.voters
            and (not backup.follows or backup.op_number < self._uncommitted[0][0])
        )

    def _quorum_op_number(self, is_quorum: IsQuorum) -> int:
        """Return the highest operation number that a quorum has acknowledged; -1 if there is none."""
        op_numbers = {node: backup.op_number for node, backup in self._backups.items() if backup.follows}
        op_numbers[self._me] = self._log.op_number
        for number in sorted(set(op_numbers.values()), reverse=True):
            if is_quorum(self._view, {node for node, acked in op_numbers.items() if acked >= number}):
                return number
        return -1

    def _replicate(self, now: float) -> Iterator[ReplicaSend]:
        for node, backup in self._backups.items():
            yield from self._send_append(node, backup, now)

    def _send_append(
        self, node: bytes, backup: _Backup, now: float, *, force: bool = False
    ) -> Iterator[ReplicaSend]:
        """Send a backup the operations that it lacks.

        At most one append is in flight per backup, so that a slow backup gets larger batches.
        """
        if backup.awaits_ack:
            return
        log = self._log
        first = backup.op_number + 1
        operations = log.since(first) if backup.is_position_known and first >= log.oldest_op else ()
        if operations or force:
            backup.awaits_ack, backup.sent_at = True, now
            append = AppendEntry(
                self.ballot, self._base_ballot, self._base_op_number, log.oldest_op, first, operations
            )
            yield ReplicaSend(node, append)

    def _mark_used(self, scope: Namespace, now: float) -> None:
        self._last_used[scope] = now
        if len(self._last_used) > 4 * self._log.rules.max_namespaces:  # reads may name absent namespaces
            existing = set(self._log.store.namespaces)
            self._last_used = {
                other: used_at for other, used_at in self._last_used.items() if other in existing
            }

    def _drop_idle_namespace(self, scope: Namespace, now: float) -> None:
        """Drop the namespace that was idle for longest, if it was idle for hours and its slot is needed."""
        store = self._log.store
        if store.rules.is_durable or store.can_open(scope):
            return
        oldest = min(store.namespaces, key=lambda other: self._last_used.get(other, now))
        if now - self._last_used.get(oldest, now) > IDLE_NAMESPACE_S:
            self._log.apply(DropNamespace(oldest, bytes(16), self._log.op_number, store.founding))
            self._last_used.pop(oldest, None)
