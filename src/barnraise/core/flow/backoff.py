"""A member's patience: pauses that grow, and a word about them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from barnraise.core.sanitize import printable

SAY_AFTER_S = 10.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 20.0


class ReportedBackoff:
    """Pauses that grow, and a word about them after ten seconds and then each minute."""

    def __init__(
        self,
        whom: str,
        say: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._whom, self._say, self._sleep, self._clock = whom, say, sleep, clock
        self._began = clock()
        self._said = self._began - 50.0
        self._pause = _FIRST_PAUSE_S

    @property
    def waited_s(self) -> float:
        return self._clock() - self._began

    def note(self, why: str) -> None:
        now = self._clock()
        if now - self._began >= SAY_AFTER_S and now - self._said >= 60.0:
            self._said = now
            self._say(f"waiting for {now - self._began:.0f} s for {self._whom}: {printable(why)}")

    def pause(self, why: str, least_s: float = 0.0) -> None:
        self.note(why)
        # Drawn at random, so that a thousand members do not come back in the same moment.
        self._sleep(max(least_s, self._pause * random.uniform(0.5, 1.0)))
        self._pause = min(_LONGEST_PAUSE_S, 2 * self._pause)
