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

logger = logging.getLogger(__name__)
SLOW_S = 1.0  # a usual disk syncs in some hundredths of this, also an old one
_STUCK_S = 5.0  # a single commit that takes so long is enough
_SLOW_ONES, _QUICK_ONES = 3, 5  # one after the other, before it is called slow, and well again
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


class DiskLatency:
    """The thread that writes says when a commit begins and ends; anybody may ask."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began: float | None = None
        self._slow: list[float] = []  # the seconds of the last ones, without a break
        self._quick = 0
        self._is_slow = False
        self.on_commit: Callable[[float], None] = lambda _: None

    def begin(self) -> None:
        self._began = self._now()

    def end(self) -> None:
        assert self._began is not None
        took = self._now() - self._began
        self._began = None
        if took >= SLOW_S:
            self._slow, self._quick = [*self._slow, took][-_SLOW_ONES:], 0
        else:
            self._slow, self._quick = [], self._quick + 1
        if len(self._slow) >= _SLOW_ONES or took >= _STUCK_S:
            self._is_slow = True
        elif self._quick >= _QUICK_ONES:
            self._is_slow = False
        self.on_commit(took)

    def slow_s(self) -> float | None:
        """How long a commit takes now, if the disk is slow. None if it is not."""
        began = self._began
        waits = 0.0 if began is None else self._now() - began
        if not self._is_slow and waits < _STUCK_S:
            return None
        return max([SLOW_S, waits, *self._slow])


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
