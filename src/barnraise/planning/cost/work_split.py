"""Split of work by speed, so that all machines finish at about the same time. Pure.

The session assigns its micro-batches by the same rule, with ``runs.sharding.assign_micro_batches``. That
function also handles micro-batches that are already computed, and visits each of them. The planner needs
only the counts, for thousands of groups, so it computes them directly. A test checks that both agree.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def split_by_speed(pieces: int, speeds: Sequence[float]) -> list[int]:
    """Return how many equal pieces each machine gets; the last one finishes as early as possible."""
    total = sum(speeds)
    # The whole part of each share is certain; the rest goes to the machine that would finish first.
    counts = [max(0, int(pieces * speed / total * (1 - 1e-9))) for speed in speeds]
    waiting = [((count + 1) / speeds[index], index) for index, count in enumerate(counts)]
    heapq.heapify(waiting)
    for _ in range(pieces - sum(counts)):
        _, index = waiting[0]
        counts[index] += 1
        heapq.heapreplace(waiting, ((counts[index] + 1) / speeds[index], index))
    return counts


def split_samples(batch: int, micro_batch: int, speeds: Sequence[float]) -> list[int]:
    """Return the samples of each machine, in whole micro-batches; the rest of the batch is a smaller one."""
    whole, rest = divmod(batch, micro_batch)
    samples = [count * micro_batch for count in split_by_speed(whole, speeds)]
    if rest:
        last = min(range(len(speeds)), key=lambda index: ((samples[index] + rest) / speeds[index], index))
        samples[last] += rest
    return samples
