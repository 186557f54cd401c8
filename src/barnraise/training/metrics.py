"""What the script logs: means over whole batches, known one commit later, as it often logs after the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

MOST_KEPT = 1 << 16  # entries; twice as many before the older half is dropped

Logged = dict[str, tuple[float, float]]  # by name: the weighted sum, and the weight


class MetricsLog:
    """``history``: one entry for each step that was logged while this member was there, not too long ago."""

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []
        self._dropped = 0  # entries before it
        self._by_step: dict[int, Logged] = {}
        self._at = (0, 1.0)

    def begin_unit(self, step: int, size: float) -> None:
        self._at = (step, size)

    def log(self, values: Mapping[str, Any]) -> None:
        step, size = self._at
        logged = self._by_step.setdefault(step, {})
        for name, value in values.items():
            number = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            total, weight = logged.get(name, (0.0, 0.0))
            logged[name] = (total + number * size, weight + size)

    def of_step(self, step: int) -> Logged:
        return self._by_step.get(step, {})

    @property
    def count(self) -> int:
        """Entries so far, with those that are forgotten."""
        return self._dropped + len(self.history)

    def since(self, count: int) -> list[dict[str, float]]:
        """The entries after so many."""
        return self.history[max(0, count - self._dropped) :]

    def mean(self, step: int, name: str) -> float | None:
        """Of what this member has logged in a step so far."""
        total, weight = self.of_step(step).get(name, (0.0, 0.0))
        return total / weight if weight else None

    def learn(self, said: Iterable[Logged], done: int) -> None:
        """What every member logged of the step before the one that was just committed."""
        means: Logged = {}
        for logged in said:
            for name, (total, weight) in logged.items():
                before = means.get(name, (0.0, 0.0))
                means[name] = (before[0] + total, before[1] + weight)
        found = {name: total / weight for name, (total, weight) in means.items() if weight}
        if found:
            self.history.append(found)
        if len(self.history) > 2 * MOST_KEPT:
            del self.history[:MOST_KEPT]
            self._dropped += MOST_KEPT
        self._by_step = {step: values for step, values in self._by_step.items() if step >= done - 1}
