"""Log and state of one replica, and the transfer of snapshots between replicas. Pure."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from barnraise.agent_client.kv_messages import WRITES, Operation, Result, weight
from barnraise.core.errors import ProtocolError
from barnraise.kvstore.messages import (
    CHUNK_BYTES,
    NO_BALLOT,
    SnapshotChunk,
    SnapshotRequest,
    ViewBallot,
)
from barnraise.kvstore.store import IN_MEMORY, KeyValueStore, StoreRules

_LOG_BYTES = 8 << 20
_LOG_LENGTH = 4096
_PIN_S = 10.0
_MAX_PINS = 4
RETRY_S = 0.5


class ReplicaLog:
    """State of the store after ``op_number`` operations, with the newest operations for backups that lag.

    ``log_ballot``: the ballot of the last operation. A durable log also collects what its disk lacks:
    ``unsaved`` writes with their numbers, or ``is_replaced`` if a snapshot has replaced everything.
    """

    def __init__(self, rules: StoreRules = IN_MEMORY) -> None:
        self.rules = rules
        self.store = KeyValueStore(b"", rules)
        self.unsaved: list[tuple[int, Operation]] = []
        self.is_replaced = False
        self.log_ballot = NO_BALLOT
        self.op_number = 0
        self._entries: deque[tuple[Operation, int]] = deque()
        self._nbytes = 0

    @property
    def oldest_op(self) -> int:
        """Return the number of the first operation in the log; ``op_number`` plus one if it is empty."""
        return self.op_number - len(self._entries) + 1

    def apply(self, operation: Operation) -> Result:
        """Append an operation to the log, apply it to the store, and return its result."""
        self.op_number += 1
        nbytes = weight(operation)
        self._entries.append((operation, nbytes))
        self._nbytes += nbytes
        while len(self._entries) > _LOG_LENGTH or (self._nbytes > _LOG_BYTES and len(self._entries) > 1):
            self._nbytes -= self._entries.popleft()[1]
        if self.rules.is_durable and isinstance(operation, WRITES):
            self.unsaved.append((self.op_number, operation))
        return self.store.apply(operation, self.op_number)

    def replace(self, store: KeyValueStore, ballot: ViewBallot, op_number: int) -> None:
        """Replace state and log by a snapshot."""
        self.store, self.log_ballot, self.op_number = store, ballot, op_number
        self._entries.clear()
        self._nbytes = 0
        self.unsaved.clear()
        self.is_replaced = self.rules.is_durable

    def since(self, first: int) -> tuple[Operation, ...]:
        """Return the operations from number ``first`` on, as many as fit into one message."""
        taken: list[Operation] = []
        size = 0
        for index in range(max(first - self.oldest_op, 0), len(self._entries)):
            operation, nbytes = self._entries[index]
            size += nbytes
            if taken and size > CHUNK_BYTES:
                break
            taken.append(operation)
        return tuple(taken)


class _Pin:
    """Snapshot that is kept while other replicas fetch it chunk by chunk."""

    __slots__ = ("data", "used_at")

    def __init__(self, data: bytes, now: float) -> None:
        self.data = data
        self.used_at = now


class SnapshotSender:
    """Server of snapshot chunks; a snapshot does not change during its transfer."""

    def __init__(self, log: ReplicaLog) -> None:
        self._log = log
        self._pins: dict[tuple[ViewBallot, int], _Pin] = {}

    def answer(self, request: SnapshotRequest, now: float) -> SnapshotChunk:
        """Return the requested chunk, or the first chunk of a new snapshot."""
        wanted = (request.log_ballot, request.op_number)
        pin = self._pins.get(wanted) if request.offset else None
        if pin is None:  # the first chunk, or the pinned state has expired: start at offset 0
            wanted, pin = self._pin_current(now)
            offset = 0
        else:
            offset = request.offset
        pin.used_at = now
        data = pin.data[offset : offset + CHUNK_BYTES]
        return SnapshotChunk(request.transfer, wanted[0], wanted[1], len(pin.data), offset, data)

    def tick(self, now: float) -> None:
        """Drop snapshots that were not requested for a while."""
        for key in [key for key, pin in self._pins.items() if now - pin.used_at > _PIN_S]:
            del self._pins[key]

    def _pin_current(self, now: float) -> tuple[tuple[ViewBallot, int], _Pin]:
        """Return a snapshot of the current state.

        An older snapshot would not do: the receiver may have lost operations that it acknowledged, and needs
        them back.
        """
        key = (self._log.log_ballot, self._log.op_number)
        pin = self._pins.get(key)
        if pin is None:
            pin = self._pins[key] = _Pin(self._log.store.to_snapshot(), now)
        if len(self._pins) > _MAX_PINS:
            del self._pins[min((other for other in self._pins if other != key), key=self._used_at)]
        return key, pin

    def _used_at(self, key: tuple[ViewBallot, int]) -> float:
        return self._pins[key].used_at


class ReceivedSnapshot(NamedTuple):
    """Complete snapshot, and the log position that it was taken at."""

    store: KeyValueStore
    log_ballot: ViewBallot
    op_number: int


class SnapshotReceiver:
    """Transfer of one snapshot from another replica, chunk by chunk."""

    def __init__(
        self, source: bytes, ballot: ViewBallot, transfer: bytes, now: float, rules: StoreRules = IN_MEMORY
    ) -> None:
        self._rules = rules
        self.source = source
        self.ballot = ballot
        self._transfer = transfer
        self._version = (NO_BALLOT, 0)
        self._data = bytearray()
        self._requested_at = now
        self.progress_at = now

    def request(self, now: float) -> SnapshotRequest:
        """Return the request for the next chunk."""
        self._requested_at = now
        return SnapshotRequest(self.ballot, self._transfer, len(self._data), *self._version)

    def is_overdue(self, now: float) -> bool:
        """Return True if the last request should be sent again."""
        return now - self._requested_at > RETRY_S

    def receive(self, chunk: SnapshotChunk, now: float) -> ReceivedSnapshot | bool:
        """Return the snapshot once it is complete; True to request the next chunk, False to keep waiting.

        Raise ProtocolError if the data cannot be a snapshot.
        """
        if chunk.transfer != self._transfer or chunk.total > self._rules.max_snapshot_bytes:
            return False
        version = (chunk.log_ballot, chunk.op_number)
        if chunk.offset == 0 and version != self._version:
            self._version, self._data = version, bytearray()
        if version != self._version or chunk.offset != len(self._data) or not chunk.data:
            return False
        if len(self._data) + len(chunk.data) > chunk.total:
            raise ProtocolError("a snapshot of the store is longer than announced")
        self._data += chunk.data
        self.progress_at = now
        if len(self._data) < chunk.total:
            return True
        return ReceivedSnapshot(
            KeyValueStore.from_snapshot(bytes(self._data), self._rules), chunk.log_ballot, chunk.op_number
        )
