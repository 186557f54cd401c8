"""Threads that run the calls of other workers: a limited number at once, the others in order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from barnraise.collectives.completion_thread import CompletionThread

log = logging.getLogger("barnraise.rpc")

MAX_WAITING = 10_000
MAX_WAITING_BYTES = 2 << 30


class CallPool:
    """Pool of ``threads`` threads with a bounded queue. A thread that is idle for some seconds exits."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = CompletionThread()
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._waiting_bytes = 0
        self._running = 0

    def submit(self, nbytes: int, job: Callable[[], None]) -> str | None:
        """Run a job that holds some bytes. Return the reason if too many jobs wait already."""
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                return f"{MAX_WAITING} calls wait there"
            if self._waiting and self._waiting_bytes + nbytes > MAX_WAITING_BYTES:
                return f"calls with {self._waiting_bytes} bytes wait there"
            self._waiting.append((nbytes, job))
            self._waiting_bytes += nbytes
            if self._running == self._threads:
                return None
            self._running += 1
        self._pool.submit(self._work)
        return None

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until no job runs or waits, or until the timeout."""
        self._pool.wait_idle(timeout_s)

    def clear(self) -> None:
        """Drop the jobs that wait."""
        with self._lock:
            self._waiting.clear()
            self._waiting_bytes = 0

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                nbytes, job = self._waiting.popleft()
                self._waiting_bytes -= nbytes
            try:
                job()
            except Exception:
                log.exception("a remote call could not be answered")  # and the thread goes on
            del job  # or its arguments would live until the next job
