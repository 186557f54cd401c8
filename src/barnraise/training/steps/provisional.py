"""What a member trains without a quorum, and that it is told when such steps were dropped."""

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
from barnraise.training.group.manager import WorkerId

log = logging.getLogger("barnraise.training")

_ASK_S = 5.0


class Trains(Protocol):
    """What is needed of the session."""

    @property
    def done(self) -> int: ...

    @property
    def provisional(self) -> bool: ...


class ProvisionalSteps:
    """To be called after each commit. The first worker of a machine does it for all of them."""

    def __init__(self, place: WorkerId | None, home: Path | None) -> None:
        self._place = place if place is not None and place.local_rank == 0 else None
        self._home = home
        self._last: int | None = None  # where it stood before the step at hand
        self._began: int | None = None
        self._is_known = False  # whether steps of an earlier worker of this machine were dropped

    @classmethod
    def of(cls, place: WorkerId | None) -> ProvisionalSteps:
        kept = os.environ.get("BARNRAISE_CHECKPOINTS")  # a container keeps nothing
        return cls(place, Path(kept).parent if kept else None)

    def __call__(self, session: Trains) -> None:
        if self._place is None or self._home is None:
            return
        before = self._last if self._last is not None else max(0, session.done - 1)
        self._last = session.done
        if session.provisional:
            self._began = before if self._began is None else self._began
            note_steps(self._home, self._began, session.done)
            return
        self._began = None
        if not self._is_known:
            self._is_known = True
            steps = take_dropped(self._home)
            if steps:
                self._tell(self._place, steps, before)

    def _tell(self, place: WorkerId, steps: int, onward: int) -> None:
        try:
            with ListenerClient.connect(place.state) as client:
                client.ask(encode(DroppedStepsRequest(place.run, steps, onward)), _ASK_S)
        except BarnraiseError as error:
            log.warning("%d provisional steps are dropped; the agent could not be told: %s", steps, error)
