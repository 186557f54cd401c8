"""Leases of samples: their size and duration, and the updates delivered for them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence

import msgspec

from barnraise.hub.protocol.messages import HubDataOrder, RoundConfig, SampleSpan
from barnraise.hub.rounds.sample_pool import first_samples, subtract_spans

MAX_LEASE_ROUNDS = 3  # most rounds that a lease may last, at any claimed speed
_GROWTH = 4  # largest factor from one lease to the next, because a claimed speed may be wrong
_MOST_TIMES = 32  # the samples that the middle one of the others manages: a large machine among small ones
LEAST_NORMS = 3  # of updates, that tell what size is usual


class ActiveLease(msgspec.Struct, frozen=True, array_like=True):
    """A lease that a member holds."""

    id: str
    node: str
    version: int
    spans: tuple[SampleSpan, ...]
    seconds: float
    overdue: float  # by the hub's monotonic clock: rounds do not wait for it afterwards
    void: float  # its spans return
    patience: float = 0.0  # until then its round waits for an upload that moves

    @property
    def samples(self) -> int:
        return sum(span.size for span in self.spans)


class PendingUpdate(msgspec.Struct, frozen=True, array_like=True, order=True):
    """An accepted update that waits for its round."""

    id: str
    node: str
    lease: str
    version: int
    samples: int
    spans: tuple[SampleSpan, ...] = ()  # part of the lease; if empty, its first samples
    of_stranger: bool = False


def can_be_compared(waiting: Collection[PendingUpdate], known: int) -> bool:
    """Tell whether there is a measure for strangers' updates: known norms, a friend's update, or enough of
    them."""
    is_enough = known >= LEAST_NORMS or len(waiting) >= LEAST_NORMS
    return is_enough or any(not update.of_stranger for update in waiting)


def renew(lease: ActiveLease, terms: RoundConfig, now: float) -> ActiveLease:
    """Return the lease with its whole time again, for a restarted hub whose monotonic clock differs."""
    void = now + lease.seconds * (2 + terms.stale_limit)
    return msgspec.structs.replace(lease, overdue=now + lease.seconds, void=void, patience=void)


def held_s(lease: ActiveLease, terms: RoundConfig, now: float) -> float:
    """Return the seconds since the member got the lease.

    ``patience`` is set once, when the lease is granted.
    """
    return max(0.0, now - (lease.patience - lease.seconds * (2 + terms.stale_limit)))


def untrained_spans(lease: ActiveLease, update: PendingUpdate) -> list[SampleSpan] | None:
    """Return the lease's samples that the update does not cover. Return None if it covers other samples."""
    rest = subtract_spans(lease.spans, update.spans or first_samples(lease.spans, update.samples))
    left = sum(span.size for span in rest or ())
    return rest if left == lease.samples - update.samples else None


def lease_size(terms: RoundConfig, course: HubDataOrder, rate: float, usual: int, middle: int) -> int:
    """Return the number of samples that fit a round.

    ``usual``: samples of the member's last update, or 0. ``middle``: median of the other members.
    """
    first = terms.first_batches * course.batch
    max_samples = _GROWTH * usual if usual else first
    if middle:
        max_samples = min(max_samples, _MOST_TIMES * middle)
    wanted = rate * terms.round_s if rate else usual or first
    return round_to_batch(course, min(wanted, max_samples))


def median_without(standing: Sequence[int], own: int) -> int:
    """Return the upper median of the sorted values, excluding ``own``; 0 if empty."""
    place = bisect_left(standing, own)
    is_there = place < len(standing) and standing[place] == own
    count = len(standing) - is_there
    middle = count // 2
    return standing[middle + (is_there and middle >= place)] if count else 0


def round_to_batch(course: HubDataOrder, samples: float) -> int:
    """Round down to an eighth of a batch, at least one batch, so that slow members do not finish far too
    early."""
    grain = max(1, course.batch // 8)
    return max(course.batch, int(samples) // grain * grain)


def lease_seconds(terms: RoundConfig, samples: int, rate: float) -> float:
    """Return the time in which the update is expected."""
    longest = MAX_LEASE_ROUNDS * terms.round_s
    needed = min(samples / rate, longest) if rate else longest
    return needed * (1 + terms.grace) + terms.slack_s
