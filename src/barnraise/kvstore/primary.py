"""The primary's work: numbers the operations, hands them on, and answers when a quorum holds them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from barnraise.agent_client.kv_messages import DropNamespace, Namespace, Operation, Result
from barnraise.kvstore.messages import AppendAck, AppendEntry, IsQuorum, ReplicaSend, ReplicaView, ViewBallot
from barnraise.kvstore.snapshot import ReplicaLog
from barnraise.kvstore.store import MOST_SCOPES

RETRY_S = 0.25
IDLE_S = 6 * 3600.0
MOST_UNANSWERED = 20_000


class RequestOrigin(NamedTuple):
    """Who waits for an answer: a request of one life of a node."""

    node: bytes
    life: bytes
    request: int


class DueReply(NamedTuple):
    origin: RequestOrigin
    result: Result


class _Backup:
    """What the primary knows of another copy."""

    __slots__ = ("follows", "known", "number", "sent", "waiting")

    def __init__(self) -> None:
        self.number = 0
        self.known = False  # whether `number` is where it stands; not so while it fetches the board
        self.follows = False
        self.waiting = False  # for the answer to what was sent last
        self.sent = 0.0


class Primary:
    """One primary, in one view, under one ballot. ``copy`` is its own and has everything."""

    def __init__(
        self, me: bytes, view: ReplicaView, ballot: ViewBallot, copy: ReplicaLog, now: float
    ) -> None:
        self.ballot = ballot
        self.committed = -1  # nothing is, before a quorum follows
        self._me = me
        self._view = view
        self._copy = copy
        self._base, self._base_number = copy.held, copy.number
        copy.held = ballot
        self._backups = {node: _Backup() for node in view.members if node != me}
        self._unanswered: deque[tuple[int, RequestOrigin, Result]] = deque()
        self._open: set[RequestOrigin] = set()
        self._touched: dict[Namespace, float] = dict.fromkeys(copy.board.scopes, now)

    def begin(self, now: float, *, anew: bool) -> list[ReplicaSend]:
        """``anew``: nobody's copy is the beginning of this board, all must fetch it."""
        if anew:
            self._base = self.ballot
        return [
            send
            for node, backup in self._backups.items()
            for send in self._send(node, backup, now, poke=True)
        ]

    def take(self, operation: Operation, origin: RequestOrigin, now: float) -> list[ReplicaSend]:
        """Number it, unless it is under way already."""
        if origin in self._open or len(self._unanswered) >= MOST_UNANSWERED:
            return []
        self._make_room(operation.scope, now)
        self._touch(operation.scope, now)
        result = self._copy.apply(operation)
        self._open.add(origin)
        self._unanswered.append((self._copy.number, origin, result))
        return list(self._spread(now))

    def held(self, node: bytes, message: AppendAck, now: float) -> list[ReplicaSend]:
        backup = self._backups.get(node)
        if backup is None or message.ballot != self.ballot or (backup.follows and not message.follows):
            return []
        backup.waiting = False
        backup.known = not message.fetching
        backup.number = max(backup.number, message.number) if backup.follows else message.number
        backup.follows = message.follows
        return list(self._send(node, backup, now))

    def knocked(self, node: bytes, now: float) -> list[ReplicaSend]:
        """It has nothing of this reign, whatever it said in an earlier life."""
        if node not in self._backups:
            return []
        backup = self._backups[node] = _Backup()
        return list(self._send(node, backup, now, poke=True))

    def tick(self, now: float) -> list[ReplicaSend]:
        sends: list[ReplicaSend] = []
        for node, backup in self._backups.items():
            behind = not backup.follows or backup.number < self._copy.number
            if behind and now - backup.sent > RETRY_S:
                backup.waiting = False
                sends += self._send(node, backup, now, poke=True)
        return sends

    def due(self, is_quorum: IsQuorum) -> list[DueReply]:
        """What a quorum holds by now and has not been answered yet."""
        if self.committed < self._copy.number:
            self.committed = max(self.committed, self._held_by_quorum(is_quorum))
        ready = []
        while self._unanswered and self._unanswered[0][0] <= self.committed:
            _, origin, result = self._unanswered.popleft()
            self._open.discard(origin)
            ready.append(DueReply(origin, result))
        return ready

    def missing(self) -> tuple[bytes, ...]:
        """Voters who do not hold all yet; empty if nobody waits for them."""
        if not self._unanswered:
            return ()
        return tuple(
            node
            for node, backup in self._backups.items()
            if node in self._view.voters and (not backup.follows or backup.number < self._unanswered[0][0])
        )

    def _held_by_quorum(self, is_quorum: IsQuorum) -> int:
        held = {node: backup.number for node, backup in self._backups.items() if backup.follows}
        held[self._me] = self._copy.number
        for number in sorted(set(held.values()), reverse=True):
            if is_quorum(self._view, {node for node, has in held.items() if has >= number}):
                return number
        return -1

    def _spread(self, now: float) -> Iterator[ReplicaSend]:
        for node, backup in self._backups.items():
            yield from self._send(node, backup, now)

    def _send(self, node: bytes, backup: _Backup, now: float, *, poke: bool = False) -> Iterator[ReplicaSend]:
        """What it lacks; one message at a time, so that more operations go together when it is slow."""
        if backup.waiting:
            return
        copy = self._copy
        first = backup.number + 1
        operations = copy.since(first) if backup.known and first >= copy.oldest else ()
        if operations or poke:
            backup.waiting, backup.sent = True, now
            prepare = AppendEntry(self.ballot, self._base, self._base_number, copy.oldest, first, operations)
            yield ReplicaSend(node, prepare)

    def _touch(self, scope: Namespace, now: float) -> None:
        self._touched[scope] = now
        if len(self._touched) > 4 * MOST_SCOPES:  # readers may name scopes that are not there
            existing = set(self._copy.board.scopes)
            self._touched = {one: then for one, then in self._touched.items() if one in existing}

    def _make_room(self, scope: Namespace, now: float) -> None:
        """Drop the scope that has been idle longest, if it was idle for hours and its place is needed."""
        board = self._copy.board
        if board.has_room_for(scope):
            return
        oldest = min(board.scopes, key=lambda other: self._touched.get(other, now))
        if now - self._touched.get(oldest, now) > IDLE_S:
            self._copy.apply(DropNamespace(oldest, bytes(16), self._copy.number, board.founding))
            self._touched.pop(oldest, None)
