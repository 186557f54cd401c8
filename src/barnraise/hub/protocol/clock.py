"""Time that signatures go by, and clocks that jump. All lengths of time are monotonic; the wall clock is for
people and for signatures.

A clock that goes back would make old signatures new again. So the time of signatures follows the wall clock
forwards and never back, neither in a process nor from one to the next (`latest_signed`).
"""

from __future__ import annotations

from collections.abc import Callable

from barnraise.core.units import format_duration

JUMP_S = 10.0  # less is told to nobody


class ClockJumps:
    """Whether the wall clock goes on as the monotonic one does. A clock that is set slowly does not jump."""

    def __init__(self, wall: float, now: float) -> None:
        self._ahead = wall - now

    def seen(self, wall: float, now: float) -> float:
        """By how many seconds it jumped since the last look; 0 if it did not."""
        before, self._ahead = self._ahead, wall - now
        jumped = self._ahead - before
        return jumped if abs(jumped) >= JUMP_S else 0.0


class SignatureClock:
    """What a hub signs with, and judges signatures by: later than ``after``, and never going back."""

    def __init__(self, wall: Callable[[], float], now: Callable[[], float], after: float) -> None:
        self._wall, self._now = wall, now
        self._time, self._at = max(wall(), after + 1.0), now()

    def __call__(self) -> float:
        at = self._now()
        self._time = max(self._wall(), self._time + at - self._at)
        self._at = at
        return self._time


def way(seconds: float) -> str:
    """How far a clock jumped, and in which direction."""
    return f"{'ahead' if seconds > 0 else 'back'} by {format_duration(abs(seconds))}"


def describe_skew(ahead_s: float, jumped_s: float) -> str:
    """By a member whose clock is ``ahead_s`` of its hub's, after a jump or always."""
    if jumped_s:
        return f"this machine's clock jumped {way(jumped_s)}: it goes on with the hub's time; set the clock"
    where = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"this machine's clock is {format_duration(abs(ahead_s))} {where} the hub's: it goes on with the "
        "hub's time; set whichever of the two is wrong"
    )
