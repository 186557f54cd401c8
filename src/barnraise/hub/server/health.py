"""What a hub has to say about its own machine: a slow disk, a clock that jumped, no room for connections.

Each is told once when it begins, in the log and on the page, with what to do; and once when it is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from barnraise.core.units import format_duration
from barnraise.hub.protocol.clock import ClockJumps, way
from barnraise.hub.server.disk import DiskLatency

logger = logging.getLogger(__name__)
_LOOK_S = 1.0
_CLOCK_SHOWN_S = 3600.0
_FASTER_DISK = (
    "Stop what else keeps the disk busy, or move the hub's directory to a faster one: an SSD rather than a "
    "memory card, a USB stick or a network share. Nothing is lost meanwhile: who asks waits for the disk."
)
_SET_CLOCK = (
    "See that the clock is right now. Rounds and leases do not depend on it, and members whose clocks differ "
    "go on with the hub's time; ages on the page, and when invites expire, go by the clock."
)


class HealthWarning(NamedTuple):
    words: str
    hint: str
    until: float | None = None  # by the monotonic clock; without it, until it is over


class HealthStatus:
    """Those of now, by kind."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._known: dict[str, HealthWarning] = {}

    def tell(self, kind: str, trouble: HealthWarning, *, again: bool = False) -> None:
        """Once while it lasts, unless it is something new each time (``again``)."""
        if again or not self._lasts(self._known.get(kind)):
            logger.warning("%s. %s", trouble.words, trouble.hint)
        self._known[kind] = trouble

    def over(self, kind: str, words: str) -> None:
        if self._known.pop(kind, None) is not None:
            logger.info("%s", words)

    def shown(self) -> list[HealthWarning]:
        return [one for one in self._known.values() if self._lasts(one)]

    def _lasts(self, trouble: HealthWarning | None) -> bool:
        return trouble is not None and (trouble.until is None or self._now() < trouble.until)


class HealthMonitor:
    """Looks at the disk and the clock of a hub's machine."""

    def __init__(
        self, troubles: HealthStatus, disk: DiskLatency, clock: Callable[[], float], now: Callable[[], float]
    ) -> None:
        self._troubles, self._disk, self._clock, self._now = troubles, disk, clock, now
        self._jumps = ClockJumps(clock(), now())

    async def turn(self) -> bool:
        """One of many: it is never the last."""
        self.look()
        await asyncio.sleep(_LOOK_S)
        return False

    def look(self) -> None:
        slow = self._disk.slow_s()
        if slow is None:
            self._troubles.over("disk", "the hub's disk is as fast as usual again")
        else:
            words = f"the hub's disk is slow: a commit of its log takes {format_duration(slow)}"
            self._troubles.tell("disk", HealthWarning(words, _FASTER_DISK))
        now = self._now()
        jumped = self._jumps.seen(self._clock(), now)
        if jumped:
            slept = ", or it slept" if jumped > 0 else ""
            words = f"this machine's clock jumped {way(jumped)}{slept}"
            self._troubles.tell("clock", HealthWarning(words, _SET_CLOCK, now + _CLOCK_SHOWN_S), again=True)
