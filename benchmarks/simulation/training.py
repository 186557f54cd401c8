"""A session of many simulated machines: the steps of ``training.steps`` with waits for the computing.

One object stands for all members, since each of them concludes the same from the same words. A ledger counts
in which sums each unit was when its step was committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import NamedTuple

from backyard.runs.commit import Word, conclude
from backyard.runs.leases import Course, Unit, cut, lease
from backyard.training.pace import Pace
from backyard.training.sync import Sync
from benchmarks.fake_clock import FakeClock
from benchmarks.simulation.network import Network
from benchmarks.simulation.operations import Operation
from benchmarks.simulation.sums import MANY, Links, Summing, all_gather, make_sum

_WORD_BYTES = 1024  # a member's row in a gathering of words
_RESULT = b"r"


@lru_cache(maxsize=16)
def leased(
    span: int,
    unit: int,
    claimed: tuple[tuple[int, frozenset[int]], ...],
    shares: tuple[float, ...],
    tried: frozenset[int],
) -> tuple[tuple[int, ...], ...]:
    """`lease` of a step or round of so many samples: kept, as thousands of members take it seconds."""
    return lease(cut(0, span, unit), dict(claimed), shares, tried)


class Costs(NamedTuple):
    """Seconds of a machine besides computing samples, and of a group.

    ``unit_s``: to take a unit's gradients; ``inner_s``: of a local step; ``commit_s``: to apply a result.
    ``notice_s``: from a death until the others' operations fail; ``meet_s``: until they are in a new group.
    """

    unit_s: float = 0.0
    inner_s: float = 0.0
    commit_s: float = 0.002
    notice_s: float = 0.05
    meet_s: float = 0.4


class Committed(NamedTuple):
    """A commit: of how many batches, by how many members, and what it took since the one before."""

    at: float
    batches: int
    members: int
    sync: Sync
    seconds: float
    computing_s: float  # of all members together


class Ledger:
    """Units by how often they were in a committed sum, and how often they were computed."""

    def __init__(self) -> None:
        self.once = self.lost = self.doubled = self.computed = 0

    def commit(self, units: tuple[Unit, ...], sums: Mapping[int, set[int]]) -> None:
        counts = dict.fromkeys((unit.number for unit in units), 0)
        for numbers in sums.values():
            for number in numbers:
                counts[number] += 1
        self.once += sum(count == 1 for count in counts.values())
        self.lost += sum(count == 0 for count in counts.values())
        self.doubled += sum(count > 1 for count in counts.values())


class Training:
    """``speeds``: samples per second of each machine; ``begin`` starts it, the clock does the rest."""

    def __init__(
        self,
        clock: FakeClock,
        network: Network,
        links: Links,
        speeds: Mapping[int, float],
        course: Course,
        numbers: int,
        costs: Costs,
    ) -> None:
        self.clock, self.network, self.links = clock, network, links
        self.speeds, self.course, self.numbers, self.costs = dict(speeds), course, numbers, costs
        self.sync = Sync()
        self.wanted: Sync | None = None
        self.commits: list[Committed] = []
        self.ledger = Ledger()
        self.on_commit: list[Callable[[Committed], None]] = []
        self.pace = Pace()
        self.generation = 0
        self.members: list[int] = []
        self.holders: set[int] = set()  # who has the result of the step at hand
        self._alive = set(speeds)
        self._comers = set(speeds)  # who will be in the next group, if they live
        self._with_state: set[int] = set()
        self._told: dict[int, float] = {}  # speeds
        self._done = self._covered = 0
        self._units: tuple[Unit, ...] = ()
        self._claimed: dict[int, set[int]] = {}
        self._ready: set[int] = set()
        self._busy: dict[int, tuple[float, int]] = {}  # seconds and samples of each in this step
        self._computing_s = 0.0
        self._sum: Summing | None = None
        self._wish: Sync | None = None
        self._is_broken = self._is_meeting = False
        self._last_commit = 0.0

    def begin(self) -> None:
        self._last_commit = self.clock.now
        self._meet()

    # what happens to machines

    def die(self, machine: int) -> None:
        self._alive.discard(machine)
        self._comers.discard(machine)
        self._with_state.discard(machine)
        if machine in self.members:
            self.clock.later(self.costs.notice_s, partial(self._break, self.generation))

    def come(self, machine: int) -> None:
        """A machine that was healed beside the others; it is let in after a commit."""
        self._alive.add(machine)
        self._comers.add(machine)

    def _break(self, generation: int) -> None:
        if generation != self.generation:
            return
        self._is_broken = True
        self.network.drop(self._owner)
        self._meet_when_all_came()

    @property
    def _owner(self) -> tuple[str, int]:
        return ("sum", self.generation)

    # groups

    def _meet_when_all_came(self) -> None:
        """Whoever still computes is waited for."""
        living = [one for one in self.members if one in self._alive]
        if self._is_broken and not self._is_meeting and all(one in self._ready for one in living):
            self._meet_soon()

    def _meet_soon(self) -> None:
        self._is_meeting = True
        self.clock.later(self.costs.meet_s, self._meet)

    def _meet(self) -> None:
        self.generation += 1
        self._is_broken = self._is_meeting = False
        self.members = sorted(self._comers)
        if not self._with_state & self._comers and self._done:
            raise RuntimeError("everybody who had the state is gone; checkpoints are not simulated")
        words = [
            Word(
                fresh=one not in self._with_state,
                done=self._done,
                held=_RESULT if one in self.holders else b"",
                units=tuple(sorted(self._claimed.get(one, ()))),
                nursed=one not in self._with_state,
                speed=self._told.get(one, 0.0),
            )
            for one in self.members
        ]
        verdict = conclude(words)
        self.pace.begin_group(verdict.speeds)
        was_fresh = not self._with_state
        if verdict.apply:
            self._commit(None)
            return
        self._with_state |= set(self.members)
        kept = {one: set(verdict.claimed[rank]) for rank, one in enumerate(self.members)}
        self._claimed = {one: units for one, units in kept.items() if units}
        self._deal(is_new=was_fresh)

    # steps

    def _deal(self, *, is_new: bool) -> None:
        if is_new or not self._units:
            self._units = self.course.units(self._covered, self.sync.period)
        world = len(self.members)
        claimed = {
            rank: frozenset(self._claimed[one])
            for rank, one in enumerate(self.members)
            if one in self._claimed
        }
        first, last = self.course.span(self._covered, self.sync.period)
        shares = self.pace.shares if len(self.pace.shares) == world else [1.0] * world
        held = tuple(claimed.items())
        dealt = leased(last - first, self.course.unit, held, tuple(shares), self.pace.due(world))
        self.pace.dealt([len(dealt[rank]) + len(claimed.get(rank, ())) for rank in range(world)])
        self._ready, self.holders = set(), set()
        self._sum = None
        for rank, one in enumerate(self.members):
            samples = sum(self._units[number].size for number in dealt[rank])
            seconds = samples / self.speeds[one] + len(dealt[rank]) * self.costs.unit_s
            if self.sync.is_local and samples:
                seconds += max(1, samples // max(1, self.sync.inner)) * self.costs.inner_s
            computed = partial(self._computed, self.generation, one, dealt[rank], samples, seconds)
            self.clock.later(seconds, computed)

    def _computed(
        self, generation: int, machine: int, numbers: tuple[int, ...], samples: int, seconds: float
    ) -> None:
        if generation != self.generation or machine not in self._alive:
            return
        self._claimed.setdefault(machine, set()).update(numbers)
        self.ledger.computed += len(numbers)
        self._computing_s += seconds
        before = self._busy.get(machine, (0.0, 0))
        self._busy[machine] = (before[0] + seconds, before[1] + samples)
        self._ready.add(machine)
        if self._is_broken:
            self._meet_when_all_came()
            return
        if self._sum is None:
            self._wish = self.wanted if self.pace.is_known else None
            self._sum = make_sum(
                self.sync,
                self.clock,
                self.network,
                self._owner,
                self.members,
                partial(self._held, self.generation),
                self.links,
                self.numbers,
            )
        self._sum.begin(self.members.index(machine))

    def _held(self, generation: int, rank: int) -> None:
        if generation != self.generation or self._is_broken:
            return
        self.holders.add(self.members[rank])
        if len(self.holders) == len(self.members):
            self._say_words()

    def _say_words(self) -> None:
        """Each tells that it holds the result, and more; all hear all."""
        if len(self.members) > MANY:
            self.network.exchange(self._owner, self.members, _WORD_BYTES, self._all_heard)
            return
        missing = len(self.members)

        def heard(_: int) -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                self._all_heard()

        programs = all_gather(_WORD_BYTES, self.members, self.links)
        operation = Operation(self.network, self._owner, self.members, programs, heard)
        for rank in range(len(self.members)):
            operation.begin(rank)

    def _all_heard(self) -> None:
        if not self._is_broken:
            self._commit(self._speeds())

    def _speeds(self) -> list[float]:
        found = []
        for one in self.members:
            seconds, samples = self._busy.get(one, (0.0, 0))
            found.append(samples / seconds if seconds else self._told.get(one, 0.0))
        return found

    def _commit(self, speeds: list[float] | None) -> None:
        """``speeds``: as all have heard them; None if a group broke before that."""
        self.ledger.commit(self._units, self._claimed)
        if speeds is not None:
            self._told.update(zip(self.members, speeds, strict=True))
            self.pace.learn(speeds, 0)
        batches = self.course.steps(self._covered, self.sync.period)
        now = self.clock.now
        made = Committed(
            now, batches, len(self.members), self.sync, now - self._last_commit, self._computing_s
        )
        self._last_commit, self._computing_s = now, 0.0
        self._covered += batches
        self._done += 1
        self._claimed, self.holders, self._busy = {}, set(), {}
        self._with_state |= set(self.members)
        if self._wish is not None:
            self.sync = self._wish.dealt(self.course.batch, len(self.members))
        self.commits.append(made)
        for notice in self.on_commit:
            notice(made)
        self._units = ()
        self.clock.later(self.costs.commit_s, partial(self._go_on, self.generation))

    def _go_on(self, generation: int) -> None:
        if generation != self.generation:
            return
        if self._is_broken or set(self.members) != self._comers:
            if not self._is_meeting:
                self._meet_soon()
            return
        self._deal(is_new=True)
