"""Provisional steps: notes steps trained without a quorum, and reports those that were discarded."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Protocol

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import encode
from barnraise.agent_client.provisional import note_steps, take_dropped
from barnraise.agent_client.run_requests import DroppedStepsRequest
from barnraise.core.errors import BarnraiseError
from barnraise.training.group.agent_client import WorkerId

log = logging.getLogger("barnraise.training")

_REQUEST_S = 5.0


class ProvisionalStatus(Protocol):
    """The part of a session that is needed here."""

    @property
    def done(self) -> int: ...

    @property
    def provisional(self) -> bool: ...


class ProvisionalSteps:
    """Callback after each commit. The first worker of a machine acts for all of its workers."""

    def __init__(self, worker: WorkerId | None, folder: Path | None) -> None:
        self._worker = worker if worker is not None and worker.local_rank == 0 else None
        self._folder = folder
        self._last: int | None = None  # committed steps before the current one
        self._start: int | None = None
        self._is_checked = False  # for discarded steps of an earlier worker of this machine

    @classmethod
    def of(cls, worker: WorkerId | None) -> ProvisionalSteps:
        """Build the callback; without a checkpoint folder, as in a container, it does nothing."""
        checkpoints = os.environ.get("BARNRAISE_CHECKPOINTS")
        return cls(worker, Path(checkpoints).parent if checkpoints else None)

    def __call__(self, session: ProvisionalStatus) -> None:
        if self._worker is None or self._folder is None:
            return
        before = self._last if self._last is not None else max(0, session.done - 1)
        self._last = session.done
        if session.provisional:
            self._start = before if self._start is None else self._start
            note_steps(self._folder, self._start, session.done)
            return
        self._start = None
        if not self._is_checked:
            self._is_checked = True
            steps = take_dropped(self._folder)
            if steps:
                self._report(self._worker, steps, before)

    def _report(self, worker: WorkerId, steps: int, onward: int) -> None:
        """Report discarded steps to the agent."""
        try:
            with ListenerClient.connect(worker.state) as client:
                client.ask(encode(DroppedStepsRequest(worker.run, steps, onward)), _REQUEST_S)
        except BarnraiseError as error:
            log.warning(
                "%d steps without a majority were discarded; the agent could not be notified: %s",
                steps,
                error,
            )
