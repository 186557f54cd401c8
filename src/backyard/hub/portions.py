"""How many samples a lease has, and how long it may take: by a speed that its member claims. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from backyard.hub.messages import Course, Terms

LONGEST = 3  # rounds that a lease is cut for, whatever speed is claimed
_GROWTH = 4  # times the samples of the last lease at most: a claimed speed is believed by and by
_MOST_TIMES = 32  # the samples that the middle one of the others manages: a large machine among small ones


def fitting(terms: Terms, course: Course, rate: float, usual: int, others: Sequence[int]) -> int:
    """Samples that fit the round's time. ``usual``: of its last update, or 0; and of ``others``."""
    first = terms.first_batches * course.batch
    most = _GROWTH * usual if usual else first
    if others:
        most = min(most, _MOST_TIMES * statistics.median_high(others))
    wanted = rate * terms.round_s if rate else usual or first
    return rounded(course, min(wanted, most))


def rounded(course: Course, samples: float) -> int:
    """A batch at least. Not whole ones: who trains few in a round would end it long before the others."""
    grain = max(1, course.batch // 8)
    return max(course.batch, int(samples) // grain * grain)


def seconds_for(terms: Terms, samples: int, rate: float) -> float:
    """In which the update is expected."""
    longest = LONGEST * terms.round_s
    needed = min(samples / rate, longest) if rate else longest
    return needed * (1 + terms.grace) + terms.slack_s
