"""Backoff: the seconds before the next attempt, after each failure. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_MAX_EXPONENT = 32


@dataclass(frozen=True)
class Backoff:
    """Exponential backoff: waits that double from ``first_s`` to ``max_s``.

    ``jitter``: the largest share of a wait that is left out at random, so that clients that failed together
    do not retry together.
    """

    first_s: float
    max_s: float
    jitter: float = 0.0

    def wait(self, attempt: int, uniform: Callable[[float, float], float] = random.uniform) -> float:
        """Return the seconds to wait after attempt number ``attempt``, counted from 0."""
        wait_s = float(min(self.max_s, self.first_s * 2 ** min(attempt, _MAX_EXPONENT)))
        return wait_s * uniform(1.0 - self.jitter, 1.0) if self.jitter else wait_s


@dataclass(frozen=True)
class SteppedBackoff:
    """Backoff by a table of waits in seconds; the last one repeats."""

    waits_s: tuple[float, ...]

    def wait(self, attempt: int) -> float:
        """Return the seconds to wait after attempt number ``attempt``, counted from 0."""
        return self.waits_s[min(attempt, len(self.waits_s) - 1)]


class BackoffTimer:
    """Attempts of one task that failed in a row, and the wait that follows the last one."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._failures = 0

    def next_wait(self) -> float:
        """Count a failure and return the seconds to wait before the next attempt."""
        self._failures += 1
        return self._backoff.wait(self._failures - 1)

    def reset(self) -> None:
        """Start again with the first wait, after a success."""
        self._failures = 0
