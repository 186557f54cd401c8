"""Bounds of what members report about their speeds, links and memory. Pure.

A report decides where blocks go, so a wrong one may let all wait, or give one machine everything. A figure
that no machine or line has counts as the nearest possible one. What a micro-batch keeps in memory follows
from the model, so it is almost the same everywhere. A report counts at most four times that of the middle
member.
"""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.planning.split.stage_time import BlockSpeed
from barnraise.training.pipeline.prediction.kept_activations import KeptBytes

_LEAST_S, _MOST_S = 1e-6, 1e5  # seconds of a pass: the start of one kernel, and more than a day
_SLOWEST, _FASTEST = 1e3, 1e12  # bytes per second of a link
_MOST_LATENCY_S = 10.0
_MOST_KEPT = 4  # times what the middle member reports


def possible_seconds(seconds: float) -> float:
    """Return the seconds of a pass; 0 stays, because it says that they are unknown."""
    return min(max(seconds, _LEAST_S), _MOST_S) if seconds > 0 else 0.0


def possible_speed(speed: BlockSpeed) -> BlockSpeed:
    """Return the speed of a machine; one without both passes of a block is unknown."""
    if not (speed.forward_s > 0 and speed.backward_s > 0):
        return BlockSpeed()
    besides = (min(each, _MOST_S) for each in (speed.before_s, speed.after_s, speed.around_s))
    return BlockSpeed(possible_seconds(speed.forward_s), possible_seconds(speed.backward_s), *besides)


def possible_rate(rate: float) -> float:
    """Return the bytes per second of a link; 0 stays, because it says that they are unknown."""
    return min(max(rate, _SLOWEST), _FASTEST) if rate > 0 else 0.0


def possible_latency(seconds: float) -> float:
    """Return the one-way latency of a link."""
    return min(seconds, _MOST_LATENCY_S)


def most_kept(reports: Sequence[KeptBytes]) -> tuple[KeptBytes, list[int]]:
    """Return the most that a micro-batch keeps on a machine, and the ranks whose reports are too large."""
    limits = [_MOST_KEPT * _middle(column) for column in zip(*reports, strict=True)]
    block, after = (
        max(min(value, limit) for value in column)
        for column, limit in zip(zip(*reports, strict=True), limits, strict=True)
    )
    too_large = [
        rank
        for rank, report in enumerate(reports)
        if any(value > limit for value, limit in zip(report, limits, strict=True))
    ]
    return KeptBytes(block, after), too_large


def _middle(values: Sequence[int]) -> int:
    """Return the middle value; of an even number of values, that of the two which is nearer to the first."""
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return min(low, high, key=lambda value: abs(value - values[0]))
