"""Decision whether a run is stalled: no committed step for much longer than a step usually takes. Pure.

Steps are reported by the machine of the main worker. While this machine does not hear that one, the run may
train all the same: then there is no news, which is no stall.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from barnraise.core.units import format_duration
from barnraise.history.sentences import duration, listed

FACTOR = 10.0  # times the usual time of a step
_KEPT = 15
_RETURN_S = 10.0  # a machine that is heard again reports what it has done meanwhile


class StepPace(msgspec.Struct, frozen=True):
    """Steps of a run as its reports show them. ``step``: the newest one; None: none was committed yet.

    ``silent_s``: seconds since it was reported. ``recent_s``: mean seconds of a step between two reports.
    ``heard_s``: for how long the machine that reports has been heard; 0: it is not.
    """

    step: int | None = None
    silent_s: float = 0.0
    recent_s: tuple[float, ...] = ()
    heard_s: float = 0.0

    @property
    def usual_s(self) -> float | None:
        """Return the usual seconds of a step: the median of the recent ones; None if it is unknown."""
        return median(self.recent_s) if self.recent_s else None


def next_pace(pace: StepPace, step: int | None, elapsed_s: float, *, is_heard: bool = True) -> StepPace:
    """Return the pace after ``elapsed_s`` more seconds, with the step that is reported now.

    A smaller step than before is a rollback: the run is alive, and its pace stays. ``is_heard``: the machine
    that reports the steps is heard now.
    """
    silent_s = pace.silent_s + elapsed_s
    heard_s = pace.heard_s + elapsed_s if is_heard else 0.0
    if step is None or step == pace.step:
        return StepPace(pace.step, silent_s, pace.recent_s, heard_s)
    if pace.step is None or step < pace.step:
        return StepPace(step, 0.0, pace.recent_s, heard_s)
    return StepPace(step, 0.0, (*pace.recent_s, silent_s / (step - pace.step))[-_KEPT:], heard_s)


def no_news_reason(pace: StepPace, least_s: float, unheard: Sequence[str]) -> str:
    """Return the sentence about a run of which this machine hears nothing; empty if it hears of it.

    ``unheard``: names of the machines that would report its steps.
    """
    if pace.heard_s > 0 or not _is_silent(pace, least_s):
        return ""
    return f"no news from {listed(unheard)} for {duration(pace.silent_s)}; the run may go on there"


def stall_reason(pace: StepPace, least_s: float, wait_reason: str = "") -> str:
    """Return why the run counts as stalled; empty if it does not, or if that is not known.

    ``least_s``: a shorter silence is none, because checkpoints, evaluations and restarts take their time. A
    run without a usual time of a step is never stalled. ``wait_reason``: what its workers wait for.
    """
    usual_s = pace.usual_s
    if usual_s is None or pace.heard_s < _RETURN_S or not _is_silent(pace, least_s):
        return ""
    usual = f"a step usually takes {format_duration(usual_s)}"
    sentence = f"no step for {duration(pace.silent_s)}, and {usual}"
    return f"{sentence}; {wait_reason}" if wait_reason else sentence


def _is_silent(pace: StepPace, least_s: float) -> bool:
    """Tell whether no step was reported for much longer than one usually takes."""
    return pace.usual_s is not None and pace.silent_s > max(least_s, FACTOR * pace.usual_s)
