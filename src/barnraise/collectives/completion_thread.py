"""Completes torch futures on separate threads.

Callbacks of a future run where the future is completed, and may wait for another operation (torch's
PowerSGD hook does). On the thread that reads replies such a callback would deadlock. So each completion
runs on an idle thread, and threads that stay idle exit.
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
    """Thread pool with as many threads as completions that run at once."""

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # one permit per thread that waits for a job
        self._unfinished = 0
        self._finished = threading.Condition()

    def submit(self, job: Callable[[], object]) -> None:
        """Run ``job`` on an idle thread, or on a new one."""
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
                continue  # a submitter reserved this thread: its job follows
            try:
                job()
            except Exception:
                log.exception("a callback of a future failed")
            del job  # or its tensors would live until the next job
            with self._finished:
                self._unfinished -= 1
                self._finished.notify_all()
            self._idle.release()

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until no completion runs.

        At interpreter exit a thread inside torch would crash the whole process.
        """
        with self._finished:
            self._finished.wait_for(lambda: not self._unfinished, timeout_s)


completion_threads = CompletionThread()


def _new_in_child() -> None:
    global completion_threads
    completion_threads = CompletionThread()  # a fork copies no threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_in_child)
