"""Reports of the training's progress to the agent: step, newest loss and speed, about once a second."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import encode
from barnraise.agent_client.queue.requests import METRIC_VARIABLE
from barnraise.agent_client.run_requests import MAX_METRIC, ProgressRequest, TrainingProgress
from barnraise.core.errors import BarnraiseError
from barnraise.core.sanitize import printable
from barnraise.training.group.agent_client import WorkerId

log = logging.getLogger("barnraise.training")

_INTERVAL_S = 1.0
_REQUEST_S = 5.0
_CLOSE_S = 2.0
_WINDOW_S = 20.0
_SEARCHED = 10_000  # newest entries among which a value is searched that is logged rarely
_MAX_SPEED = 1e15


class StepRate:
    """Moving average of the steps per second over the last 20 s, or over the last two reports. Pure."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()  # time and step, only where the step changed

    def add(self, time_s: float, step: int) -> None:
        """Note the time of a committed step. An earlier step than the last one starts the average again."""
        if self._marks and step < self._marks[-1][1]:
            self._marks.clear()
        if not self._marks or step > self._marks[-1][1]:
            self._marks.append((time_s, step))
        while len(self._marks) > 2 and time_s - self._marks[1][0] >= _WINDOW_S:
            self._marks.popleft()

    @property
    def steps_per_s(self) -> float:
        """Return the average; 0 if it is unknown."""
        if len(self._marks) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


def newest_value(history: Sequence[Mapping[str, float]], wanted: str = "") -> tuple[str, float]:
    """Return the newest logged loss, or else the first logged value, with its name; empty if none.

    ``wanted``: name of the value that counts, which may be logged less often than others.
    """
    if wanted:
        newest = next((entry for entry in reversed(history[-_SEARCHED:]) if wanted in entry), None)
        return (wanted[:MAX_METRIC], float(newest[wanted])) if newest is not None else ("", 0.0)
    newest = history[-1] if history else {}
    name = "loss" if "loss" in newest else next(iter(newest), "")
    return printable(name)[:MAX_METRIC], float(newest[name]) if name else 0.0


class TrainingStatus(Protocol):
    """The part of a session that is needed here."""

    @property
    def done(self) -> int: ...

    @property
    def is_main(self) -> bool: ...

    @property
    def history(self) -> list[dict[str, float]]: ...

    @property
    def total_steps(self) -> int | None: ...


class ProgressReporter:
    """Callback after each commit, and the thread that reports the newest one.

    ``batch``: samples of a step, of all workers. ``counts``: what the steps are. A commit costs one reading
    of the clock. Only the main worker reports.
    """

    def __init__(
        self,
        worker: WorkerId,
        session: TrainingStatus,
        batch: int,
        counts: Literal["step", "item"] = "step",
    ) -> None:
        self._worker, self._session, self._batch = worker, session, batch
        self._counts: Literal["step", "item"] = counts
        self._committed: tuple[float, int] | None = None  # the newest commit: time and step
        # The newest commit and value that were reported.
        self._reported: tuple[tuple[float, int], tuple[str, float]] | None = None
        self._rate = StepRate()
        self._metric = os.environ.get(METRIC_VARIABLE, "")
        self._client: ListenerClient | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="barnraise-progress", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __call__(self) -> None:
        self._committed = (time.monotonic(), self._session.done)

    def close(self) -> None:
        """Report the last step, when the script ends."""
        self._is_closing.set()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._report(_CLOSE_S)

    def _run(self) -> None:
        while not self._is_closing.wait(_INTERVAL_S):
            self._report(_REQUEST_S)

    def _report(self, timeout_s: float) -> None:
        committed = self._committed
        if committed is None:
            return
        self._rate.add(*committed)
        newest = newest_value(self._session.history, self._metric)
        if (committed, newest) == self._reported:  # a value may become known after the last commit
            return
        self._reported = committed, newest
        if self._session.is_main:
            self._send(self._progress(committed[1], *newest), timeout_s)

    def _progress(self, step: int, name: str, value: float) -> TrainingProgress:
        speed = min(self._rate.steps_per_s, _MAX_SPEED)
        samples_per_s = min(speed * self._batch, _MAX_SPEED)
        total = self._session.total_steps
        return TrainingProgress(step, total, name, value, speed, samples_per_s, self._counts)

    def _send(self, progress: TrainingProgress, timeout_s: float) -> None:
        run, local_rank, start, *_ = self._worker
        try:
            if self._client is None:
                self._client = ListenerClient.connect(self._worker.state)
            self._client.ask(encode(ProgressRequest(run, local_rank, start, progress)), timeout_s)
        except BarnraiseError as error:
            log.info("the progress was not reported to the agent: %s", error.message)
            if self._client is not None:
                self._client.close()
            self._client = None
