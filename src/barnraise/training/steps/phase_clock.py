"""Clock of phases: the seconds of a step that this worker spent on data, computing, communication."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal, get_args

Phase = Literal["data", "compute", "communication", "vote", "checkpoint", "other"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class PhaseClock:
    """Seconds by phase since the last `take`.

    With local steps, communication goes on while the worker computes. Then the phases may add up to more
    than the step.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds: dict[Phase, float] = {}
        self._taken_at = now()
        self._computing_since: float | None = None

    def add(self, phase: Phase, seconds: float) -> None:
        """Add seconds to a phase."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    @contextlib.contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Add the time of the block to a phase."""
        start = self._now()
        try:
            yield
        finally:
            self.add(phase, self._now() - start)

    @contextlib.contextmanager
    def load_data(self) -> Iterator[None]:
        """Count the block as loading of a micro-batch, and what follows as the script's own work."""
        self.stop_computing()
        with self.measure("data"):
            yield
        self.start_computing()

    def start_computing(self) -> None:
        """Count what follows as the script's own work, up to `stop_computing`."""
        self._computing_since = self._now()

    def stop_computing(self, sending_s: float = 0.0) -> float:
        """Count the script's work until now. Return ``sending_s``: the part of it that sent gradients."""
        if self._computing_since is not None:
            self.add("compute", max(0.0, self._now() - self._computing_since - sending_s))
            self.add("communication", sending_s)
        self._computing_since = None
        return sending_s

    def take(self) -> tuple[float, dict[Phase, float]]:
        """Return the seconds since the last call, and those of each phase; the rest is ``other``."""
        now = self._now()
        total, self._taken_at = now - self._taken_at, now
        phases, self._seconds = self._seconds, {}
        phases["other"] = max(0.0, total - sum(phases.values()))
        return total, phases
