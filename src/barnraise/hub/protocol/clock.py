"""Time of signatures, and detection of clock jumps.

Durations are monotonic; the wall clock is for people and signatures.

A clock that is set back would make old signatures valid again. So the time of signatures never goes back,
neither within a process nor across restarts (`replay_guard`).
"""

from __future__ import annotations

from collections.abc import Callable

from barnraise.core.units import format_duration

JUMP_S = 10.0  # smaller jumps are not reported


class ClockJumps:
    """Detector of jumps of the wall clock against the monotonic one. Slow adjustment is no jump."""

    def __init__(self, wall: float, now: float) -> None:
        self._ahead = wall - now

    def check(self, wall: float, now: float) -> float:
        """Return the seconds that the clock jumped since the last check; 0 if it did not."""
        before, self._ahead = self._ahead, wall - now
        jumped = self._ahead - before
        return jumped if abs(jumped) >= JUMP_S else 0.0


class SignatureClock:
    """Clock for signing and for judging signatures: later than ``after``, and never going back."""

    def __init__(self, wall: Callable[[], float], now: Callable[[], float], after: float) -> None:
        self._wall, self._now = wall, now
        self._time, self._at = max(wall(), after + 1.0), now()

    def __call__(self) -> float:
        at = self._now()
        self._time = max(self._wall(), self._time + at - self._at)
        self._at = at
        return self._time


def describe_jump(seconds: float) -> str:
    """Return how far a clock jumped, and in which direction."""
    return f"{'ahead' if seconds > 0 else 'back'} by {format_duration(abs(seconds))}"


def describe_skew(ahead_s: float, jumped_s: float) -> str:
    """Return the message of a member whose clock is ``ahead_s`` ahead of the hub's, or has jumped."""
    if jumped_s:
        jump = describe_jump(jumped_s)
        return f"this machine's clock jumped {jump}: it uses the hub's time from now on; set the clock"
    where = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"this machine's clock is {format_duration(abs(ahead_s))} {where} the hub's: it uses the "
        "hub's time from now on; set the clock that is wrong"
    )
