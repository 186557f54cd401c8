"""A copy of the board with the newest operations that made it, and its way from machine to machine. Pure."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from barnraise.agent_client.kv_messages import Operation, Result, weight
from barnraise.core.errors import ProtocolError
from barnraise.kvstore.messages import (
    CHUNK_BYTES,
    LARGEST_IMAGE,
    NOBODY,
    SnapshotChunk,
    SnapshotRequest,
    ViewBallot,
)
from barnraise.kvstore.store import KeyValueStore

_LOG_BYTES = 8 << 20
_LOG_LENGTH = 4096
_PIN_S = 10.0
_MOST_PINS = 4
RETRY_S = 0.5


class ReplicaLog:
    """The board after ``number`` operations, the last of them in the reign ``held``."""

    def __init__(self) -> None:
        self.board = KeyValueStore(b"")
        self.held = NOBODY
        self.number = 0
        self._log: deque[tuple[Operation, int]] = deque()
        self._weight = 0

    @property
    def oldest(self) -> int:
        """The number of the first operation that is still at hand; one above `number` if none is."""
        return self.number - len(self._log) + 1

    def apply(self, operation: Operation) -> Result:
        self.number += 1
        heavy = weight(operation)
        self._log.append((operation, heavy))
        self._weight += heavy
        while len(self._log) > _LOG_LENGTH or (self._weight > _LOG_BYTES and len(self._log) > 1):
            self._weight -= self._log.popleft()[1]
        return self.board.apply(operation, self.number)

    def replace(self, board: KeyValueStore, held: ViewBallot, number: int) -> None:
        self.board, self.held, self.number = board, held, number
        self._log.clear()
        self._weight = 0

    def since(self, first: int) -> tuple[Operation, ...]:
        """The operations from number ``first`` on, as many as fit into one message."""
        taken: list[Operation] = []
        size = 0
        for place in range(max(first - self.oldest, 0), len(self._log)):
            operation, heavy = self._log[place]
            size += heavy
            if taken and size > CHUNK_BYTES:
                break
            taken.append(operation)
        return tuple(taken)


class _Pin:
    """Keeps one state of the board while others fetch it piece by piece."""

    __slots__ = ("data", "used")

    def __init__(self, data: bytes, now: float) -> None:
        self.data = data
        self.used = now


class SnapshotSender:
    """Serves pieces of the board; what it began to serve does not change under the one who fetches."""

    def __init__(self, copy: ReplicaLog) -> None:
        self._copy = copy
        self._pins: dict[tuple[ViewBallot, int], _Pin] = {}

    def answer(self, request: SnapshotRequest, now: float) -> SnapshotChunk:
        wanted = (request.held, request.number)
        pin = self._pins.get(wanted) if request.offset else None
        if pin is None:  # the first piece, or what was asked for is gone: from the beginning
            wanted, pin = self._fresh(now)
            offset = 0
        else:
            offset = request.offset
        pin.used = now
        data = pin.data[offset : offset + CHUNK_BYTES]
        return SnapshotChunk(request.ticket, wanted[0], wanted[1], len(pin.data), offset, data)

    def tick(self, now: float) -> None:
        for key in [key for key, pin in self._pins.items() if now - pin.used > _PIN_S]:
            del self._pins[key]

    def _fresh(self, now: float) -> tuple[tuple[ViewBallot, int], _Pin]:
        """The board as it is now. An older one would not do: who fetches may have forgotten what it held
        already, and must not end up with less."""
        key = (self._copy.held, self._copy.number)
        pin = self._pins.get(key)
        if pin is None:
            pin = self._pins[key] = _Pin(self._copy.board.image(), now)
        if len(self._pins) > _MOST_PINS:
            del self._pins[min((other for other in self._pins if other != key), key=self._used)]
        return key, pin

    def _used(self, key: tuple[ViewBallot, int]) -> float:
        return self._pins[key].used


class ReceivedSnapshot(NamedTuple):
    board: KeyValueStore
    held: ViewBallot
    number: int


class SnapshotReceiver:
    """One board on its way here, asked for piece by piece."""

    def __init__(self, donor: bytes, ballot: ViewBallot, ticket: bytes, now: float) -> None:
        self.donor = donor
        self.ballot = ballot
        self._ticket = ticket
        self._source = (NOBODY, 0)
        self._data = bytearray()
        self._asked = now
        self.progress = now

    def request(self, now: float) -> SnapshotRequest:
        self._asked = now
        return SnapshotRequest(self.ballot, self._ticket, len(self._data), *self._source)

    def is_overdue(self, now: float) -> bool:
        return now - self._asked > RETRY_S

    def receive(self, chunk: SnapshotChunk, now: float) -> ReceivedSnapshot | bool:
        """The board once it is whole; True if the next piece should be asked for, False to go on waiting.

        ProtocolError if what came cannot be a board.
        """
        if chunk.ticket != self._ticket or chunk.total > LARGEST_IMAGE:
            return False
        source = (chunk.held, chunk.number)
        if chunk.offset == 0 and source != self._source:
            self._source, self._data = source, bytearray()
        if source != self._source or chunk.offset != len(self._data) or not chunk.data:
            return False
        if len(self._data) + len(chunk.data) > chunk.total:
            raise ProtocolError("a copy of the board is longer than it was said to be")
        self._data += chunk.data
        self.progress = now
        if len(self._data) < chunk.total:
            return True
        return ReceivedSnapshot(KeyValueStore.of_image(bytes(self._data)), chunk.held, chunk.number)
