"""Session as seen by a framework that has a training loop of its own, such as Transformers' Trainer.

A framework needs more than a script. It needs numbers of the whole batch at the commit itself, and small
state of its own that joining workers receive.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from barnraise.core.errors import RunError
from barnraise.planning import Levels
from barnraise.training.batches import Batches
from barnraise.training.session import Session
from barnraise.training.state.training_state import Notes
from barnraise.training.sync import Sync


class BatchTotals(NamedTuple):
    """Numbers of the batch that was committed last, over all workers; equal on each of them.

    ``norm``: of the gradient before it was clipped; 0 if it is not clipped.
    """

    weight: float
    sums: Sequence[float]
    norm: float


class FrameworkLoop:
    """A session with exact or encoded steps, driven by a framework. Create it before `Session.prepare`."""

    def __init__(self, session: Session, name: str, notes: Notes) -> None:
        """Raise RunError if the session cannot be driven by the framework of that ``name``."""
        if session._model is not None:
            raise RunError(
                f"the session of {name} was used by another training",
                hint="Start one process for each training: one script, one call of train().",
            )
        if session._parameter_server is not None or session._is_site:
            raise RunError(
                f"{name} does not train at a hub", hint="Write the loop yourself: docs/session.md shows how."
            )
        levels, sync = session._levels, session._sync
        periods = levels.inside.period, levels.across.period
        if (isinstance(sync, Sync) and sync.is_local) or any(period not in ("auto", 1) for period in periods):
            raise RunError(
                f"{name} does not train in rounds of local steps", hint="Use exact steps, or a codec."
            )
        if sync == "auto":  # the planner may choose a codec, but no rounds
            session._levels = Levels(
                inside=msgspec.structs.replace(levels.inside, period=1),
                across=msgspec.structs.replace(levels.across, period=1),
            )
        session._notes = notes
        self._session = session

    @property
    def microbatch_size(self) -> int:
        """Return the samples of the current micro-batch, or of the current part of it."""
        current = self._session._current
        return 0 if current is None else current.span.size

    @property
    def writes(self) -> bool:
        """Return True on workers that write files: one on each machine, and the main one."""
        return self._session.is_main or os.environ.get("LOCAL_RANK", "0") == "0"

    def add_sums(self, values: Sequence[float]) -> None:
        """Add numbers of the current micro-batch, just before ``optimizer.step()``."""
        self._session._reducer.add_sums(values)

    def log(self, values: Mapping[str, float], weight: float) -> None:
        """Log values of the current micro-batch, as `Session.log` does, with a weight of the framework."""
        self._session._metrics.log(values, weight)

    def log_after_step(self, values: Mapping[str, float]) -> None:
        """Log values of the newest committed step, such as those of an evaluation after it."""
        self._session._metrics.log_step(self._session._step_loop.done - 1, values)

    def amend_history(self, values: Mapping[str, float]) -> None:
        """Add values to the newest entry of the history, because no further step brings them there."""
        self._session._metrics.amend(values)

    def totals(self) -> BatchTotals:
        """Return the numbers of the batch that was just committed."""
        reducer = self._session._reducer
        return BatchTotals(*reducer.total_sums(), reducer.norm)

    def limit_unit(self, max_samples: int, batch: int) -> None:
        """Set the size of micro-batches to an eighth of a batch, if the script has not set it.

        ``max_samples``: their size at most.
        """
        self._session._unit_size = self._session._unit_size or min(max_samples, max(1, batch // 8))

    def announce_epochs(self, epochs: int) -> None:
        """Set the number of epochs, for the progress that is shown."""
        self._session._epochs = epochs

    def epoch(self, batches: Batches, epoch: int) -> Batches:
        """Return the batches such that iterating over them passes this epoch."""
        self._session.next_epoch = epoch
        return batches
