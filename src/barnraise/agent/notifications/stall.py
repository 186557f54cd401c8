"""Decision whether a run is stalled: no committed step for much longer than a step usually takes. Pure."""

from __future__ import annotations

from statistics import median

import msgspec

from barnraise.core.units import format_duration
from barnraise.history.sentences import duration

FACTOR = 10.0  # times the usual time of a step
_KEPT = 15


class StepPace(msgspec.Struct, frozen=True):
    """Steps of a run as its reports show them. ``step``: the newest one; None: none was committed yet.

    ``silent_s``: seconds since it was reported. ``recent_s``: mean seconds of a step between two reports.
    """

    step: int | None = None
    silent_s: float = 0.0
    recent_s: tuple[float, ...] = ()

    @property
    def usual_s(self) -> float | None:
        """Return the usual seconds of a step: the median of the recent ones; None if it is unknown."""
        return median(self.recent_s) if self.recent_s else None


def next_pace(pace: StepPace, step: int | None, elapsed_s: float) -> StepPace:
    """Return the pace after ``elapsed_s`` more seconds, with the step that is reported now.

    A smaller step than before is a rollback: the run is alive, and its pace stays.
    """
    silent_s = pace.silent_s + elapsed_s
    if step is None or step == pace.step:
        return StepPace(pace.step, silent_s, pace.recent_s)
    if pace.step is None or step < pace.step:
        return StepPace(step, 0.0, pace.recent_s)
    return StepPace(step, 0.0, (*pace.recent_s, silent_s / (step - pace.step))[-_KEPT:])


def stall_reason(pace: StepPace, least_s: float, wait_reason: str = "") -> str:
    """Return why the run counts as stalled; empty if it does not.

    ``least_s``: a shorter silence is none, because checkpoints, evaluations and restarts take their time. A
    run without a usual time of a step is never stalled. ``wait_reason``: what its workers wait for.
    """
    usual_s = pace.usual_s
    if usual_s is None or pace.silent_s <= max(least_s, FACTOR * usual_s):
        return ""
    usual = f"a step usually takes {format_duration(usual_s)}"
    sentence = f"no step for {duration(pace.silent_s)}, and {usual}"
    return f"{sentence}; {wait_reason}" if wait_reason else sentence
