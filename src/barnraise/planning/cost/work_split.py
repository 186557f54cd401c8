"""Who computes how much, so that all are done at about the same time. Pure.

The session deals its units by the same rule (``runs.leases``); here only the numbers matter.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def split_by_speed(pieces: int, speeds: Sequence[float]) -> list[int]:
    """How many equal pieces each gets; the last one is done as early as whole pieces allow."""
    total = sum(speeds)
    # Whoever is this far below its share gets these in any case; the rest goes to who would be done first.
    dealt = [max(0, int(pieces * speed / total * (1 - 1e-9))) for speed in speeds]
    waiting = [((count + 1) / speeds[place], place) for place, count in enumerate(dealt)]
    heapq.heapify(waiting)
    for _ in range(pieces - sum(dealt)):
        _, place = waiting[0]
        dealt[place] += 1
        heapq.heapreplace(waiting, ((dealt[place] + 1) / speeds[place], place))
    return dealt


def split_samples(batch: int, unit: int, speeds: Sequence[float]) -> list[int]:
    """Samples for each, in whole units; what is left of the batch is one smaller unit."""
    whole, rest = divmod(batch, unit)
    samples = [count * unit for count in split_by_speed(whole, speeds)]
    if rest:
        last = min(range(len(speeds)), key=lambda place: ((samples[place] + rest) / speeds[place], place))
        samples[last] += rest
    return samples
