"""Health of a hub's machine: slow disk, clock jumps, refused connections.

Each warning is logged once when it starts, shown on the status page with a hint, and logged once when it is
over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from barnraise.core.units import format_duration
from barnraise.hub.protocol.clock import ClockJumps, describe_jump

logger = logging.getLogger(__name__)
SLOW_S = 1.0  # a usual disk syncs in some hundredths of this, also an old one
_STUCK_S = 5.0  # a single commit that takes so long is enough
_SLOW_ONES, _QUICK_ONES = 3, 5  # one after the other, before it is called slow, and well again
_LOOK_S = 1.0
_CLOCK_SHOWN_S = 3600.0
_FASTER_DISK = (
    "Stop other programs that use the disk, or move the hub's directory to a faster disk: an SSD, not a "
    "memory card, USB stick or network share. No data is lost; requests wait until the disk catches up."
)
_SET_CLOCK = (
    "Check that the clock is right. Rounds and leases do not depend on it, and members with other clocks use "
    "the hub's time. Ages on the page and the expiry of invites follow the clock."
)


class DiskLatency:
    """Slow-disk detector, by the time that commits of the log take.

    The writing thread reports commits; any thread may read.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began: float | None = None
        self._slow: list[float] = []  # the seconds of the last ones, without a break
        self._quick = 0
        self._is_slow = False
        self.on_commit: Callable[[float], None] = lambda _: None

    def start_commit(self) -> None:
        """Note that a commit has started."""
        self._began = self._now()

    def end_commit(self) -> None:
        """Note that the commit has ended, and judge the disk by its duration."""
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
        """Return the seconds that a commit takes now, or None if the disk is not slow."""
        began = self._began
        waits = 0.0 if began is None else self._now() - began
        if not self._is_slow and waits < _STUCK_S:
            return None
        return max([SLOW_S, waits, *self._slow])


class HealthWarning(NamedTuple):
    """A warning for the owner. ``until``: monotonic time; None means until it is resolved."""

    message: str
    hint: str
    until: float | None = None  # by the monotonic clock; without it, until it is over


class HealthStatus:
    """Current health warnings of a hub, by kind."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._known: dict[str, HealthWarning] = {}

    def warn(self, kind: str, trouble: HealthWarning, *, again: bool = False) -> None:
        """Set the warning of a kind, and log it if it is new. ``again``: log it every time."""
        if again or not self._lasts(self._known.get(kind)):
            logger.warning("%s. %s", trouble.message, trouble.hint)
        self._known[kind] = trouble

    def resolve(self, kind: str, words: str) -> None:
        """Remove the warning of a kind, and log that it is over."""
        if self._known.pop(kind, None) is not None:
            logger.info("%s", words)

    def current(self) -> list[HealthWarning]:
        """Return the warnings that have not expired."""
        return [warning for warning in self._known.values() if self._lasts(warning)]

    def _lasts(self, trouble: HealthWarning | None) -> bool:
        return trouble is not None and (trouble.until is None or self._now() < trouble.until)


class HealthMonitor:
    """Periodic check of the disk and the clock of a hub's machine."""

    def __init__(
        self, troubles: HealthStatus, disk: DiskLatency, clock: Callable[[], float], now: Callable[[], float]
    ) -> None:
        self._troubles, self._disk, self._clock, self._now = troubles, disk, clock, now
        self._jumps = ClockJumps(clock(), now())

    async def run_once(self) -> bool:
        """Check once, then sleep. Return False, because the monitor never finishes."""
        self.check()
        await asyncio.sleep(_LOOK_S)
        return False

    def check(self) -> None:
        """Update the warnings about the disk and the clock."""
        slow = self._disk.slow_s()
        if slow is None:
            self._troubles.resolve("disk", "the hub's disk has its normal speed again")
        else:
            words = f"the hub's disk is slow: a commit of its log takes {format_duration(slow)}"
            self._troubles.warn("disk", HealthWarning(words, _FASTER_DISK))
        now = self._now()
        jumped = self._jumps.check(self._clock(), now)
        if jumped:
            slept = ", or the machine was suspended" if jumped > 0 else ""
            words = f"this machine's clock jumped {describe_jump(jumped)}{slept}"
            self._troubles.warn("clock", HealthWarning(words, _SET_CLOCK, now + _CLOCK_SHOWN_S), again=True)
