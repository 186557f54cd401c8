"""What one member has of the step at hand, and of the next one if it goes ahead. Pure.

While the sum of a step is on its way, what a member computes are units of the next. They become units of the
step at hand when that one is committed, also in a group that comes after the one that they were dealt in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from barnraise.runs.commit import CommitDecision
from barnraise.runs.sharding import MicroBatch
from barnraise.training.sync import Sync

# This member's part of units, of which every rank has some already.
Deal = Callable[[Sequence[MicroBatch], Mapping[int, frozenset[int]]], list[MicroBatch]]


def may_go_ahead(*, world: int, sync: Sync, coming: Sync | None) -> bool:
    """In rounds with others, if the next one is of the same kind. From what all members know alike."""
    return world > 1 and sync.is_local and coming is None


class StepProgress:
    """``pending`` are the units that this member has still to compute: ahead, of the next step."""

    def __init__(self) -> None:
        self.pending: list[MicroBatch] = []
        self.units: tuple[MicroBatch, ...] = ()  # of the step at hand
        self.claimed: set[int] = set()  # of them, those that this member has computed
        self.held = b""  # the digest of its result
        self.next_units: tuple[MicroBatch, ...] = ()  # while its sum is on its way
        self.ahead: set[int] = set()  # of them, those that this member has computed
        self.aheads: dict[int, frozenset[int]] = {}  # of every rank, from an earlier group

    @property
    def is_ahead(self) -> bool:
        return bool(self.next_units)

    @property
    def samples(self) -> int:
        """Of the whole step."""
        return sum(unit.size for unit in self.units)

    def claim(self, number: int) -> None:
        (self.ahead if self.is_ahead else self.claimed).add(number)
        self.pending = [one for one in self.pending if one.number != number]

    def is_due(self, *, has_landed: bool) -> bool:
        """Whether there is something to finish. ``has_landed``: a sum that was on its way."""
        return not self.pending or has_landed

    def begin(self, units: tuple[MicroBatch, ...], claimed: Mapping[int, frozenset[int]], deal: Deal) -> None:
        self.units = units
        self.pending = deal(units, claimed)

    def go_ahead(self, units: tuple[MicroBatch, ...], deal: Deal) -> None:
        """The sum of the step at hand is on its way: these are the next one's."""
        self.next_units = units
        self.pending = deal(units, self.aheads)
        self.aheads = {}

    def commit(self, units: Callable[[], tuple[MicroBatch, ...]], deal: Deal) -> None:
        """The next step is at hand, with these ``units``; this member may be in the midst of it."""
        self.held, self.claimed, self.ahead = b"", self.ahead, set()
        if self.is_ahead:
            self.units, self.next_units = self.next_units, ()
            return
        aheads, self.aheads = self.aheads, {}
        self.begin(units(), aheads, deal)

    def leave_group(self) -> None:
        """What this member has computed is kept, in the step that it is of."""
        self.next_units = ()

    def take_up(self, verdict: CommitDecision, rank: int) -> None:
        """What a new group has concluded of it; to begin comes next."""
        self.claimed, self.ahead = set(verdict.claimed[rank]), set(verdict.ahead[rank])
        self.aheads = dict(enumerate(verdict.ahead))
