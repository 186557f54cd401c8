"""Completes torch futures on threads of their own.

What a program hangs on a future runs where the future is completed, and may itself wait for another operation
(torch's PowerSGD hook does). On the thread that reads the mover's replies that would wait for ever; so each
completion gets a thread that is free, and threads that are idle for a while end.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable

log = logging.getLogger("barnraise.collectives")

_IDLE_S = 10.0


class CompletionThread:
    """As many threads as completions run at once."""

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # one permit per thread that waits for a job
        self._unfinished = 0
        self._finished = threading.Condition()

    def submit(self, job: Callable[[], object]) -> None:
        with self._finished:
            self._unfinished += 1
        self._jobs.put(job)
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._serve, name="barnraise-future", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_s)
            except queue.Empty:
                if self._idle.acquire(blocking=False):
                    return
                continue  # somebody counts on this thread: its job is on the way
            try:
                job()
            except Exception:
                log.exception("what hangs on a future failed")
            del job  # or it would keep its tensors until the next one
            with self._finished:
                self._unfinished -= 1
                self._finished.notify_all()
            self._idle.release()

    def drain(self, timeout_s: float) -> None:
        """Wait until nothing is being completed.

        At the interpreter's end a thread that is inside torch then would bring the whole process down.
        """
        with self._finished:
            self._finished.wait_for(lambda: not self._unfinished, timeout_s)


settler = CompletionThread()


def _new_in_child() -> None:
    global settler
    settler = CompletionThread()  # a fork copies no threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_in_child)
