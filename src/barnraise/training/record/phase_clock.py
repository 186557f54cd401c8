"""Seconds of a step by phase, as one worker measures them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Literal

from barnraise.history.entries import PHASES

Phase = Literal["data", "compute", "communication", "vote", "checkpoint", "activations"]


class PhaseClock:
    """Sums of the phases since the last commit. Only the thread that computes uses it.

    What a device computes in the background counts where the worker waits for it.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, phase: Phase, seconds: float) -> None:
        """Add seconds to a phase."""
        self._sums[phase] = self._sums.get(phase, 0.0) + max(0.0, seconds)

    @contextlib.contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Add the duration of the context to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - start)

    def seconds(self, phase: Phase) -> float:
        """Return the sum of a phase since the last commit."""
        return self._sums.get(phase, 0.0)

    def take(self, total_s: float) -> tuple[float, ...]:
        """Return the seconds of each of PHASES, and start again; the rest of the total is "other"."""
        sums, self._sums = self._sums, {}
        sums["other"] = max(0.0, total_s - sum(sums.values()))
        return tuple(sums.get(phase, 0.0) for phase in PHASES)
