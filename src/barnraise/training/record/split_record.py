"""Commits of a split model, as the recorder of a run and the metrics of the worker read them.

Every sample passes all stages, so each worker counts all samples of a step. Its share is its part of the
blocks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from msgspec import Meta
from torch.utils._pytree import tree_leaves

from barnraise.core import metrics
from barnraise.core.metrics import catalogue
from barnraise.history.entries import StateOrigin
from barnraise.training.metrics import Logged, MetricsLog
from barnraise.training.record.phase_clock import PhaseClock

_MOST_LOGGED = 4096  # values of a step that workers exchange
_MAX_NAME = 1024

LoggedValues = Annotated[
    dict[Annotated[str, Meta(max_length=_MAX_NAME)], tuple[float, float]], Meta(max_length=_MOST_LOGGED)
]


class MeasuredStage(Protocol):
    """Stage of a split model, whose numbers grow during its passes.

    ``busy_s``: seconds of forward and backward passes. ``sent_bytes``: of activations and their gradients.
    """

    busy_s: float
    sent_bytes: int


class PlannedStep(NamedTuple):
    """Predicted step of a placement. ``step_s``: 0 if unknown. ``phases_s``: seconds by PHASES."""

    step_s: float = 0.0
    phases_s: tuple[float, ...] = ()


_UNKNOWN = PlannedStep()


class PlacementNote(NamedTuple):
    """Placement of a split model in words. ``blocks``: of each machine. ``why``: its reasons."""

    title: str
    blocks: str
    why: str
    step: PlannedStep


class SplitRecord:
    """Commits of one worker. ``phases``: where the time since the last one went.

    ``assigned``: work by rank, in blocks and micro-batches. ``speeds``: samples of the whole model per second
    of computation, by rank.
    """

    def __init__(self, logged: MetricsLog) -> None:
        self.done = 0
        self.committed_samples = self.computed_samples = 0
        self.commit_range: tuple[int, int] | None = None
        self.state_origin: StateOrigin = "kept"
        self.on_commit: list[Callable[[], None]] = []
        self.on_checkpoint: list[Callable[[], None]] = []  # called before the state is saved
        self.on_handover: list[Callable[[], None]] = []  # called before new workers train with the state
        self.on_placement: list[Callable[[PlacementNote], None]] = []
        self.phases = PhaseClock()
        self.assigned: tuple[int, ...] = ()
        self.speeds: list[float] = []
        self._logged = logged
        self._busy_s = 0.0  # of the newest step
        self._sent = metrics.counter(catalogue.ACTIVATION_BYTES)

    @contextlib.contextmanager
    def passes(self, stage: MeasuredStage) -> Iterator[None]:
        """Add the passes of a step to the phases: what is no computation waits for activations of others."""
        start, busy_s, sent_bytes = time.perf_counter(), stage.busy_s, stage.sent_bytes
        try:
            yield
        finally:
            self._busy_s = stage.busy_s - busy_s
            self.phases.add("compute", self._busy_s)
            self.phases.add("activations", time.perf_counter() - start - self._busy_s)
            self._sent.inc(stage.sent_bytes - sent_bytes)

    def speed(self, rank: int, samples: int) -> float:
        """Return the samples per second of a worker that has just computed its blocks; 0 if unknown.

        It is that of the whole model, if this worker had all blocks. So speeds can be added.
        """
        if self._busy_s <= 0 or not self.assigned:
            return 0.0
        return samples / self._busy_s * self.assigned[rank] / sum(self.assigned)

    def logged(self) -> Logged:
        """Return what the script of this worker has logged for the newest committed step."""
        values = list(self._logged.of_step(self.done - 1).items())[:_MOST_LOGGED]
        return {name[:_MAX_NAME]: value for name, value in values}

    def commit(self, samples: int, loss: float, logs: Sequence[Logged], speeds: Sequence[float]) -> None:
        """Note a step that all workers apply, before the callbacks in ``on_commit`` are called.

        ``logs`` and ``speeds``: of all workers; empty if no vote has brought them. The loss counts as logged
        unless the script logs another one.
        """
        self.commit_range = (self.done, self.done + 1)
        self.done += 1
        self.committed_samples = self.computed_samples = samples
        if speeds:
            self.speeds = list(speeds)
        if logs:
            self._logged.update(logs, self.done)
        self._logged.start_microbatch(self.done - 1, 1.0)
        self._logged.set_default({"loss": loss})

    def run_callbacks(self) -> None:
        """Call what follows commits. The state has been that of the group from the first commit on."""
        for callback in self.on_commit:
            callback()
        self.state_origin = "kept"

    def hand_over(self) -> None:
        """Write everything, because new workers train with the state from now on."""
        for callback in self.on_handover:
            callback()

    def before_checkpoint(self) -> None:
        """Write the values of the newest step, because the state is saved."""
        for callback in self.on_checkpoint:
            callback()

    def place(
        self,
        done: int,
        runs: Sequence[tuple[int, int] | None],
        names: Sequence[str],
        why: Sequence[str],
        step: PlannedStep = _UNKNOWN,
        batches: Sequence[int] = (),
    ) -> None:
        """Note the blocks of each rank in a new group, which starts after ``done`` steps.

        A run is None for a rank without blocks. ``names``: of the machines by rank; empty on workers that do
        not write the placement. ``batches``: micro-batches of each rank, if replicas share them.
        """
        self.done = done
        self.assigned = tuple(
            (run[1] - run[0]) * count if run is not None else 0
            for run, count in zip(runs, batches or [1] * len(runs), strict=True)
        )
        self.speeds = []
        if names:
            stages = sum(run is not None for run in runs)
            pipelines = sum(run is not None and run[0] == 0 for run in runs)
            title = f"split over {stages} workers" if stages > 1 else "the whole model on one worker"
            title += f", in {pipelines} pipelines" if pipelines > 1 else ""
            pairs = zip(names, runs, strict=True)
            blocks = "; ".join(
                f"{name}: blocks {run[0] + 1} to {run[1]}" if run is not None else f"{name}: no blocks"
                for name, run in pairs
            )
            for callback in self.on_placement:
                callback(PlacementNote(title, blocks, "; ".join(why), step))

    def count_moved(self, states: Mapping[str, Any], stage: Collection[str]) -> None:
        """Count trained state that this worker has received because the blocks were placed again.

        ``stage``: names of what its own stage trains. It mirrors the rest.
        """
        for name, state in states.items():
            kind = "stage" if name in stage else "mirror"
            leaves = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
            metrics.counter(catalogue.MOVED_STATE_BYTES, kind).inc(sum(leaf.nbytes for leaf in leaves))
