"""The line about a run's progress: step, loss, speed, machines and the time that is left. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from barnraise.agent_client.run_requests import TrainingProgress
from barnraise.core.units import counted

_MAX_LEFT_S = 1000 * 86400.0
_SILENT_S = 10.0
_SILENT_STEPS = 5  # of the usual time of a step


class LinePart(NamedTuple):
    """A part of the line; where the line is too long, the part with the lowest ``rank`` is left out first."""

    text: str
    rank: int


def time_left_s(progress: TrainingProgress) -> float | None:
    """Return the seconds until the last step at the present speed; None if unknown."""
    if progress.total is None or not progress.steps_per_s:
        return None
    return max(0, progress.total - progress.step) / progress.steps_per_s


def is_overdue(progress: TrainingProgress, silent_s: float, patience_s: float = _SILENT_S) -> bool:
    """Tell whether the next step takes much longer than the steps before it, and than ``patience_s``."""
    usual_s = 1 / progress.steps_per_s if progress.steps_per_s else 0.0
    return progress.step != progress.total and silent_s > max(patience_s, _SILENT_STEPS * usual_s)


def format_time_left(seconds: float) -> str:
    """Format the remaining time roughly: ``42 s``, ``12 min``, ``2 h 10 min``, ``3 d 4 h``."""
    if seconds < 99.5:
        return f"{math.ceil(seconds)} s"
    if seconds > _MAX_LEFT_S:
        return "over 1000 d"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def format_value(value: float) -> str:
    """Format a logged value with three digits; NaN is ``nan``."""
    if value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"


def format_speed(samples_per_s: float) -> str:
    """Format a number of samples per second: ``0.25``, ``12.5``, ``1,230``, ``45k``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if samples_per_s >= 10 * size:
            return f"{samples_per_s / size:,.0f}{unit}"
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"


def progress_parts(
    progress: TrainingProgress,
    machines: int,
    silent_s: float = 0.0,
    *,
    reason: str = "",
    patience_s: float = _SILENT_S,
) -> list[LinePart]:
    """Return the parts of the line, in order.

    ``silent_s``: seconds since the last known step. ``reason``: what the workers wait for; it is shown once
    the next step is overdue.
    """
    total = f" of {progress.total:,}" if progress.total is not None else ""
    unit = "samples" if progress.counts == "step" else "items"
    parts = [LinePart(f"{progress.counts} {progress.step:,}{total}", 9)]
    if progress.metric:
        parts.append(LinePart(f"{progress.metric} {format_value(progress.value)}", 3))
    if progress.samples_per_s:
        parts.append(LinePart(f"{format_speed(progress.samples_per_s)} {unit}/s", 1))
    parts.append(LinePart(counted(machines, "machine"), 0))
    left = time_left_s(progress)
    if is_overdue(progress, silent_s, patience_s):
        parts.append(LinePart(f"no {progress.counts} for {format_time_left(silent_s)}", 4))
        parts += [LinePart(reason, 5)] if reason else []
    elif left is not None and progress.step != progress.total:
        parts.append(LinePart(f"{format_time_left(left)} left", 2))
    return parts


def final_parts(progress: TrainingProgress) -> list[LinePart]:
    """Return the parts of the line for a run that has ended, without speed and machines."""
    return progress_parts(progress, 0)[: 2 if progress.metric else 1]


def join_parts(parts: Sequence[LinePart], width: int) -> str:
    """Return the parts as a line of at most ``width`` characters. The most important part always stays."""
    kept = list(parts)
    while len(kept) > 1 and len(_joined(kept)) > width:
        kept.remove(min(kept, key=lambda part: part.rank))
    return _joined(kept)[:width]


def _joined(parts: Sequence[LinePart]) -> str:
    return ", ".join(part.text for part in parts)
