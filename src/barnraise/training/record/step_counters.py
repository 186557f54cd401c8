"""Counters of committed steps, in the metrics of this worker."""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.core import metrics
from barnraise.core.metrics import catalogue
from barnraise.history.entries import PHASES


class StepCounters:
    """Metrics of one worker's steps. The children of the series are looked up once, not for every step."""

    def __init__(self) -> None:
        self._steps = metrics.counter(catalogue.STEPS)
        self._samples = metrics.counter(catalogue.SAMPLES)
        self._step_time = metrics.histogram(catalogue.STEP_TIME)
        self._phases = [metrics.counter(catalogue.PHASE_TIME, phase) for phase in PHASES]
        self._group_size = metrics.gauge(catalogue.GROUP_SIZE)

    def count(self, steps: int, samples: int, seconds: float, phases_s: Sequence[float]) -> None:
        """Count a commit of this many steps, with the samples that this worker computed."""
        self._steps.inc(max(0, steps))
        self._samples.inc(samples)
        self._step_time.observe(seconds)
        for phase, spent in zip(self._phases, phases_s, strict=True):
            phase.inc(spent)

    def set_state(self, world: int, loss: float | None) -> None:
        """Set the number of workers that train together, and the newest loss if the script logs one."""
        self._group_size.set(world)
        if loss is not None:
            metrics.gauge(catalogue.LOSS).set(loss)
