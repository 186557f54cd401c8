"""How many samples a lease has, and how long it may take: by a speed that its member claims. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from barnraise.hub.protocol.messages import HubDataOrder, RoundConfig

LONGEST = 3  # rounds that a lease is cut for, whatever speed is claimed
_GROWTH = 4  # times the samples of the last lease at most: a claimed speed is believed by and by
_MOST_TIMES = 32  # the samples that the middle one of the others manages: a large machine among small ones


def fitting(terms: RoundConfig, course: HubDataOrder, rate: float, usual: int, middle: int) -> int:
    """Samples that fit the round's time. ``usual``: of its last update, or 0; ``middle``: of the others'."""
    first = terms.first_batches * course.batch
    most = _GROWTH * usual if usual else first
    if middle:
        most = min(most, _MOST_TIMES * middle)
    wanted = rate * terms.round_s if rate else usual or first
    return rounded(course, min(wanted, most))


def middle_but(standing: Sequence[int], own: int) -> int:
    """Of sorted figures the higher of the middle ones, without one's own if it is among them; 0 of none."""
    place = bisect_left(standing, own)
    is_there = place < len(standing) and standing[place] == own
    count = len(standing) - is_there
    middle = count // 2
    return standing[middle + (is_there and middle >= place)] if count else 0


def rounded(course: HubDataOrder, samples: float) -> int:
    """A batch at least. Not whole ones: who trains few in a round would end it long before the others."""
    grain = max(1, course.batch // 8)
    return max(course.batch, int(samples) // grain * grain)


def seconds_for(terms: RoundConfig, samples: int, rate: float) -> float:
    """In which the update is expected."""
    longest = LONGEST * terms.round_s
    needed = min(samples / rate, longest) if rate else longest
    return needed * (1 + terms.grace) + terms.slack_s
