"""Pending steps on simulated links: the sum of a step, and the commit votes that follow it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import msgspec

from barnraise.runs.sharding import MicroBatch, coverage_sum
from barnraise.training.steps.commit_vote import CommitVote, check_votes
from barnraise.training.sync import Sync
from benchmarks.simulation.all_reduce import MANY, Links, all_gather, make_sum
from benchmarks.simulation.fake_clock import FakeClock
from benchmarks.simulation.network import Network
from benchmarks.simulation.operations import Operation

_WORD_BYTES = 1024  # a member's row in a gathering of words


class PendingStep:
    """Pending step of one member, which ends with the votes of all members or with the group's failure."""

    def __init__(self) -> None:
        self.words: list[CommitVote] = []
        self.has_failed = False

    @property
    def has_ended(self) -> bool:
        return bool(self.words) or self.has_failed


class Setting(NamedTuple):
    """Network and members of one group."""

    clock: FakeClock
    network: Network
    links: Links
    owner: Hashable
    members: Sequence[int]


class StepSum:
    """Sum of one step in one group.

    Members start when they are ready. Callbacks report when a member holds the result, and when it has
    received the votes of all.
    """

    def __init__(
        self,
        setting: Setting,
        step: int,
        units: tuple[MicroBatch, ...],
        sync: Sync,
        numbers: int,
        held: Callable[[StepSum, int], None],
        landed: Callable[[int], None],
    ) -> None:
        self.step, self.units = step, units
        self.digest = f"{setting.owner} {step}".encode()
        self.wish: Sync | None = None  # the first member's word in it
        self.parts: dict[int, frozenset[int]] = {}  # units by machine
        self._setting, self._held, self._landed = setting, held, landed
        self._pending_steps: dict[int, PendingStep] = {}
        self._speeds: dict[int, float] = {}
        self._samples = sum(unit.size for unit in units)
        self._encoded_votes: dict[int, bytes] = {}
        self._words: list[CommitVote] = []
        clock, network, links, owner, members = setting
        self._sum = make_sum(sync, clock, network, owner, members, self._hold, links, numbers)
        self._gathering: Operation | None = None
        if len(members) <= MANY:
            programs = all_gather(_WORD_BYTES, members, links)
            self._gathering = Operation(network, owner, members, programs, self._land)

    def begin(self, rank: int, pending_step: PendingStep, units: frozenset[int], speed: float) -> None:
        """Start the sum on this rank, with these units in its part."""
        self.parts[self._setting.members[rank]] = units
        self._speeds[rank] = speed
        self._pending_steps[rank] = pending_step
        self._sum.begin(rank)

    def say(self, rank: int, newest: int) -> None:
        """Send the commit vote of this member: it holds the result."""
        own_microbatches = coverage_sum(self.parts[self._setting.members[rank]])
        speed = self._speeds[rank]
        word = CommitVote(
            self.step, self.digest, newest, speed, {}, samples=self._samples, microbatches=own_microbatches
        )
        self._encoded_votes[rank] = msgspec.msgpack.encode(word)

    def _hold(self, rank: int) -> None:
        if self._pending_steps[rank].has_failed:
            return
        self._held(self, rank)
        if self._gathering is not None:
            self._gathering.begin(rank)
        elif len(self._encoded_votes) == len(self._setting.members):
            _, network, _, owner, members = self._setting
            network.exchange(owner, members, _WORD_BYTES, self._land_all)

    def _land_all(self) -> None:
        for rank in range(len(self._setting.members)):
            self._land(rank)

    def _land(self, rank: int) -> None:
        pending_step = self._pending_steps[rank]
        if not pending_step.has_failed:
            pending_step.words = self._read()
            self._landed(rank)

    def _read(self) -> list[CommitVote]:
        """Return the votes as every member reads them; raise RunError unless each unit was in one part."""
        if not self._words:
            votes = [self._encoded_votes[rank] for rank in range(len(self._setting.members))]
            self._words = check_votes(votes, step=self.step, microbatches=len(self.units), mixed=False)
        return self._words
