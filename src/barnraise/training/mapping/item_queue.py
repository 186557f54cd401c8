"""Queue between the thread that computes items and the thread that exchanges results with other workers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from barnraise.core.errors import CollectiveError
from barnraise.runs.map_schedule import WorkerLoad

_WAKE_S = 0.5  # so that the computing thread notices signals
_SMOOTHING = 0.3

LEFT = "the script has left the map"


class ItemFailure(NamedTuple):
    """The item whose function raised an exception, and a sentence about it."""

    item: int
    sentence: str


class ItemQueue:
    """Items that this worker has to compute, and those that it has finished."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._items: deque[int] = deque()
        self._current: int | None = None
        self._started_at = 0.0
        self._finished: list[int] = []
        self._item_s = 0.0
        self._call: Callable[[], None] | None = None  # to be made on the computing thread
        self._is_over = self._is_closed = False
        self.failure: ItemFailure | None = None

    # the computing thread

    def take(self) -> int | None:
        """Wait for the next item and begin it. Return None when the map is over.

        Meanwhile make the calls that the exchange thread asks for.
        """
        while True:
            with self._changed:
                while not (self._is_over or self._call or (self._items and self.failure is None)):
                    self._changed.wait(_WAKE_S)
                call = self._call
                if call is None:
                    if self._is_over:
                        return None
                    self._current, self._started_at = self._items.popleft(), time.monotonic()
                    return self._current
            try:
                call()
            finally:
                with self._changed:
                    self._call = None
                    self._changed.notify_all()

    def finish(self) -> None:
        """Note that the current item's result is in the store."""
        with self._changed:
            assert self._current is not None
            took = time.monotonic() - self._started_at
            self._item_s += (took - self._item_s) * (_SMOOTHING if self._item_s else 1.0)
            self._finished.append(self._current)
            self._current = None
            self._changed.notify_all()

    def fail(self, sentence: str) -> None:
        """Note that the current item's function raised an exception."""
        with self._changed:
            assert self._current is not None
            self.failure = ItemFailure(self._current, sentence)
            self._changed.notify_all()

    def close(self) -> None:
        """Leave the map: the exchange thread's calls are not made any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # the exchange thread

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def load(self) -> WorkerLoad:
        """Return how much this worker has to do, and how fast it is."""
        with self._changed:
            is_busy = self._current is not None
            busy_s = time.monotonic() - self._started_at if is_busy else 0.0
            return WorkerLoad(len(self._items) + is_busy, self._item_s, busy_s)

    def claims(self) -> tuple[int, ...]:
        """Return the items that this worker has and has not finished."""
        with self._changed:
            current = () if self._current is None else (self._current,)
            return (*current, *self._items)

    def put(self, items: Sequence[int]) -> None:
        """Add items to compute."""
        with self._changed:
            self._items.extend(items)
            self._changed.notify_all()

    def give_back(self, count: int) -> tuple[int, ...]:
        """Remove the last ``count`` items, or those of them that were not begun yet, and return them."""
        with self._changed:
            return tuple(self._items.pop() for _ in range(min(count, len(self._items))))

    def take_finished(self) -> list[int]:
        """Return the items that were finished since the last call."""
        with self._changed:
            finished, self._finished = self._finished, []
            return finished

    def wait(self, seconds: float) -> None:
        """Wait for that long, or until this worker has nothing left to compute."""
        deadline = time.monotonic() + seconds
        with self._changed:
            had_work = bool(self._items) or self._current is not None
            while (left := deadline - time.monotonic()) > 0 and not self._is_closed:
                if self.failure is not None or (had_work and not self._items and self._current is None):
                    return
                self._changed.wait(left)

    def call(self, work: Callable[[], None]) -> None:
        """Let the computing thread do something between two items, and wait until it is done."""
        with self._changed:
            self._call = work
            self._changed.notify_all()
            while self._call is work and not self._is_closed:
                self._changed.wait(_WAKE_S)
            if self._is_closed:
                raise CollectiveError(LEFT)

    def end(self) -> None:
        """Tell the computing thread that the map is over."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
