"""Metrics that the script logs: averaged over whole batches, and known one commit later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

MAX_KEPT = 1 << 16  # entries; twice as many before the older half is dropped

Logged = dict[str, tuple[float, float]]  # by name: the weighted sum, and the weight


class MetricsLog:
    """Log of one worker. ``history`` has one entry for each logged step since it joined; old entries are
    dropped.
    """

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []
        self.newest: tuple[int, dict[str, float]] = (-1, {})  # the newest step with means of all workers
        self._dropped = 0  # entries before ``history``
        self._by_step: dict[int, Logged] = {}
        self._defaults: dict[int, Logged] = {}
        self._current = (0, 1.0)

    def start_microbatch(self, step: int, size: float) -> None:
        """Set the step and the number of samples that the next values belong to."""
        self._current = (step, size)

    def log(self, values: Mapping[str, Any], weight: float | None = None) -> None:
        """Add values of the current micro-batch; ``weight``: of its mean, None for its samples."""
        step, size = self._current
        self._add(step, values, size if weight is None else weight)

    def log_step(self, step: int, values: Mapping[str, Any]) -> None:
        """Add values of a step, of which every worker counts alike."""
        self._add(step, values, 1.0)

    def _add(self, step: int, values: Mapping[str, Any], own_weight: float) -> None:
        logged = self._by_step.setdefault(step, {})
        for name, value in values.items() if own_weight else ():  # a mean over nothing may be NaN
            number = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            total, weight = logged.get(name, (0.0, 0.0))
            logged[name] = (total + number * own_weight, weight + own_weight)

    def amend(self, values: Mapping[str, float]) -> None:
        """Add values to the newest entry of ``history``."""
        self.history[-1:] = [{**(self.history[-1] if self.history else {}), **values}]

    def set_default(self, values: Mapping[str, float]) -> None:
        """Set values of the current step that count unless the script logs other ones."""
        step, size = self._current
        self._defaults[step] = {name: (value * size, size) for name, value in values.items()}

    def of_step(self, step: int) -> Logged:
        """Return this worker's sums and weights of a step, by name."""
        return {**self._defaults.get(step, {}), **self._by_step.get(step, {})}

    @property
    def count(self) -> int:
        """Return the number of entries so far, including dropped ones."""
        return self._dropped + len(self.history)

    def since(self, count: int) -> list[dict[str, float]]:
        """Return the entries after the first ``count``."""
        return self.history[max(0, count - self._dropped) :]

    def mean(self, step: int, name: str) -> float | None:
        """Return the mean of this worker's values in a step, or None."""
        total, weight = self.of_step(step).get(name, (0.0, 0.0))
        return total / weight if weight else None

    def update(self, logs: Iterable[Logged], done: int) -> None:
        """Record the means over all workers for the step before the one just committed."""
        means: Logged = {}
        for logged in logs:
            for name, (total, weight) in logged.items():
                before = means.get(name, (0.0, 0.0))
                means[name] = (before[0] + total, before[1] + weight)
        entry = {name: total / weight for name, (total, weight) in means.items() if weight}
        self.newest = (done - 2, entry)
        if entry:
            self.history.append(entry)
        if len(self.history) > 2 * MAX_KEPT:
            del self.history[:MAX_KEPT]
            self._dropped += MAX_KEPT
        for held in (self._by_step, self._defaults):
            for step in [step for step in held if step < done - 1]:
                del held[step]
