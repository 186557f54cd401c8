"""A session of many simulated machines: ``training.steps`` with waits for the computing.

Each machine is a member of its own, with its progress in the current step (``training.steps.progress``).
Conclusions that all members draw alike from the same votes are computed once. A ledger counts the committed
sums that contain each unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from barnraise.runs.commit import CommitDecision, MemberState, decide_commit
from barnraise.runs.sharding import DataOrder, MicroBatch, assign_micro_batches, cut_micro_batches
from barnraise.training.steps.commit_vote import CommitVote, is_newer_group_known
from barnraise.training.steps.load_balancing import Assignment, assign_all
from barnraise.training.steps.progress import Assign, StepProgress, may_overlap
from barnraise.training.steps.throughput import Throughput
from barnraise.training.sync import Sync, next_sync
from benchmarks.simulation.all_reduce import Links
from benchmarks.simulation.fake_clock import FakeClock
from benchmarks.simulation.network import Network
from benchmarks.simulation.pending_steps import PendingStep, Setting, StepSum


class Costs(NamedTuple):
    """Seconds of a machine besides computing samples, and of a group.

    ``unit_s``: to take a unit's gradients; ``commit_s``: to apply a result. ``notice_s``: from a death until
    the others' operations fail; ``meet_s``: until they are in a new group.
    """

    unit_s: float = 0.0
    commit_s: float = 0.002
    notice_s: float = 0.05
    meet_s: float = 0.4


class Committed(NamedTuple):
    """A commit, when the first member makes it: of how many batches, by how many, and since the last one."""

    at: float
    batches: int
    members: int
    sync: Sync
    seconds: float
    computing_s: float  # of all members together


class Ledger:
    """Units by how often they were in a committed sum, and how often they were computed.

    ``ahead``: of those, how often while the sum of the step before was on its way.
    """

    def __init__(self) -> None:
        self.once = self.lost = self.doubled = self.computed = self.ahead = 0

    def commit(self, units: tuple[MicroBatch, ...], sums: Mapping[int, frozenset[int]]) -> None:
        counts = dict.fromkeys((unit.number for unit in units), 0)
        for numbers in sums.values():
            for number in numbers:
                counts[number] += 1
        self.once += sum(count == 1 for count in counts.values())
        self.lost += sum(count == 0 for count in counts.values())
        self.doubled += sum(count > 1 for count in counts.values())


class _State(NamedTuple):
    """State of all members after a number of commits."""

    covered: int = 0  # batches
    sync: Sync = Sync()
    coming: Sync | None = None


class _Member:
    """A machine while it lives."""

    def __init__(self, machine: int) -> None:
        self.machine = machine
        self.at_hand = StepProgress()
        self.is_alive = self.is_fresh = True
        self.done = 0
        self.pending_step: PendingStep | None = None
        self.is_waiting = False  # for what is on its way
        self.reported_speed = 0.0  # its speed, as the others know it
        self.busy_s, self.samples = 0.0, 0  # since the last commit

    @property
    def speed(self) -> float:
        """Return the speed, rounded so that steps with equal speeds are assigned only once."""
        return float(f"{self.samples / self.busy_s:.9g}") if self.busy_s else self.reported_speed

    def word(self, done: int) -> MemberState:
        """Return the member's state for a new group. ``done``: commits that a joining member has followed."""
        hand = self.at_hand
        return MemberState(
            fresh=self.is_fresh,
            done=done if self.is_fresh else self.done,
            held=hand.result_digest,
            units=tuple(sorted(hand.completed)),
            recovered_live=self.is_fresh,
            speed=self.speed,
            ahead=tuple(sorted(hand.ahead)),
        )


class Training:
    """``speeds``: samples per second of each machine; ``begin`` starts it, the clock does the rest.

    ``overlaps``: whether members may go ahead in rounds; with batch norms, sessions do not.
    """

    def __init__(
        self,
        clock: FakeClock,
        network: Network,
        links: Links,
        speeds: Mapping[int, float],
        course: DataOrder,
        numbers: int,
        costs: Costs,
    ) -> None:
        self.clock, self.network, self.links = clock, network, links
        self.speeds, self.course, self.numbers, self.costs = dict(speeds), course, numbers, costs
        self.overlaps = True
        self.wanted: Sync | None = None
        self.commits: list[Committed] = []
        self.ledger = Ledger()
        self.on_commit: list[Callable[[Committed], None]] = []
        self.pace = Throughput()
        self.generation = 0
        self.members: list[int] = []
        self._machines = {machine: _Member(machine) for machine in speeds}
        self._group: list[_Member] = []  # by rank
        self._ranks: dict[int, int] = {}
        self._next_members = set(speeds)  # machines of the next group, unless they die before
        self._arrived: set[int] = set()  # machines that wait for the next group
        self._states = {0: _State()}  # by commits; the last two
        self._sums: dict[int, StepSum] = {}  # by step, in this group
        self._dealt: dict[int, Assignment] = {}  # the same
        self._computing_s = 0.0
        self._is_broken = self._is_meeting = False
        self._last_commit = 0.0

    @property
    def sync(self) -> Sync:
        """Return the current synchronization mode of the members."""
        return self._states[self._done].sync

    @property
    def holders(self) -> set[int]:
        """Return the machines that hold the result of the current step."""
        return {member.machine for member in self._group if member.at_hand.result_digest}

    @property
    def in_hand(self) -> int:
        """Count the units that living members have computed and that no commit has counted yet."""
        hands = [(member.at_hand, member.done == self._done) for member in self._living()]
        return sum(len(hand.ahead) + len(hand.completed) * is_newest for hand, is_newest in hands)

    @property
    def _done(self) -> int:
        return max(self._states)

    def begin(self) -> None:
        self._last_commit = self.clock.now
        self._form()

    # what happens to machines

    def die(self, machine: int) -> None:
        self._machines[machine].is_alive = False
        self._next_members.discard(machine)
        if machine in self.members:
            self.clock.later(self.costs.notice_s, partial(self._break, self.generation))

    def come(self, machine: int) -> None:
        """Add a machine that recovered beside the others; it joins the group after a commit."""
        self._machines[machine] = _Member(machine)
        self._next_members.add(machine)

    def rest(self, machine: int) -> None:
        """Remove a machine from the group after a commit."""
        self._next_members.discard(machine)

    def _break(self, generation: int) -> None:
        if generation != self.generation:
            return
        self._is_broken = True
        self._seal()
        self._form_when_all_arrived()

    def _seal(self) -> None:
        """Drop all messages of this group, also those on their way."""
        self.network.drop(self._owner)
        for member in self._group:
            if member.pending_step is not None and not member.pending_step.has_ended:
                member.pending_step.has_failed = True
                self._wake(member)

    @property
    def _owner(self) -> tuple[str, int]:
        return ("sum", self.generation)

    def _living(self) -> list[_Member]:
        return [member for member in self._group if member.is_alive]

    # groups

    def _meet(self, member: _Member) -> None:
        member.at_hand.leave_group()
        self._arrived.add(member.machine)
        self._form_when_all_arrived()

    def _form_when_all_arrived(self) -> None:
        """Start to form the new group once all living members have arrived, also those that compute."""
        if not self._is_meeting and all(member.machine in self._arrived for member in self._living()):
            self._is_meeting = True
            self.clock.later(self.costs.meet_s, self._form)

    def _form(self) -> None:
        self._seal()
        self.generation += 1
        self._is_broken = self._is_meeting = False
        self._arrived = set()
        self.members = sorted(self._next_members)
        self._ranks = {machine: rank for rank, machine in enumerate(self.members)}
        self._group = [self._machines[machine] for machine in self.members]
        if self._done and all(member.is_fresh for member in self._group):
            raise RuntimeError("all machines with the state are dead; checkpoints are not simulated")
        verdict = decide_commit([member.word(self._done) for member in self._group])
        for member in self._group:
            if verdict.apply and not member.is_fresh and member.done < verdict.done:
                self._apply(member, (), _nothing)
        self.pace.start_group(verdict.speeds)
        self._sums, self._dealt = {}, {}
        for rank, member in enumerate(self._group):
            self._take_up(member, rank, verdict)
        for member in self._group:
            self._go_on(member)

    def _take_up(self, member: _Member, rank: int, verdict: CommitDecision) -> None:
        member.is_fresh, member.done, member.at_hand.result_digest = False, verdict.done, b""
        member.at_hand.resume_from(verdict, rank)
        units = self._units(self._states[member.done])
        member.at_hand.start_step(
            units, dict(enumerate(verdict.claimed)), partial(self._deal, member.done, rank)
        )

    # units

    def _units(self, state: _State) -> tuple[MicroBatch, ...]:
        return _units(self.course, state.covered, state.sync.period)

    def _deal(
        self, step: int, rank: int, units: Sequence[MicroBatch], claimed: Mapping[int, frozenset[int]]
    ) -> list[MicroBatch]:
        """Assign the units of a step; the result is the same for all members and computed once."""
        if step not in self._dealt:
            world = len(self.members)
            self._dealt[step], _ = assign_all(units, claimed, self.pace, world, _remembered_lease)
        return [units[number] for number in self._dealt[step][rank]]

    def _go_on(self, member: _Member) -> None:
        """Continue like `Session.microbatches`: compute the next unit, or finish the step."""
        if not member.at_hand.pending:
            self._finish(member)
            return
        unit = member.at_hand.pending[0]
        seconds = unit.size / self.speeds[member.machine] + self.costs.unit_s
        self.clock.later(seconds, partial(self._computed, member, unit, seconds))

    def _computed(self, member: _Member, unit: MicroBatch, seconds: float) -> None:
        if not member.is_alive:
            return
        self.ledger.computed += 1
        self.ledger.ahead += member.at_hand.is_ahead
        member.at_hand.add_microbatch(unit.number)
        self._computing_s += seconds
        member.busy_s += seconds
        member.samples += unit.size
        if member.at_hand.is_due(
            has_arrived=member.pending_step is not None and member.pending_step.has_ended
        ):
            self._finish(member)
        else:
            self._go_on(member)

    # steps

    def _finish(self, member: _Member) -> None:
        """Finish a step like `StepLoop.finish_step` does."""
        if member.pending_step is None:
            self._depart(member)
        else:
            self._await(member, member.pending_step)

    def _depart(self, member: _Member) -> None:
        state, rank = self._states[member.done], self._ranks[member.machine]
        member.pending_step = pending_step = PendingStep()
        if self._is_broken:
            pending_step.has_failed = True
        else:
            step_sum = self._sum_of(member, state.sync)
            if rank == 0 and self.wanted is not None and self.pace.is_known:
                step_sum.wish = self.wanted.with_inner_batch(self.course.batch, len(self.members))
            step_sum.begin(rank, pending_step, frozenset(member.at_hand.completed), member.speed)
        following = self._after(state)
        if self._may_go_ahead(state, following):
            member.at_hand.start_next_step(self._units(following), partial(self._deal, member.done + 1, rank))
            self._go_on(member)
        else:
            self._await(member, pending_step)

    def _may_go_ahead(self, state: _State, following: _State) -> bool:
        is_possible = may_overlap(world=len(self.members), sync=state.sync, coming=state.coming)
        return self.overlaps and is_possible and self.course.may_overlap(following.covered)

    def _after(self, state: _State, word: Sync | None = None) -> _State:
        """Return the state after the next commit. ``word``: the first member's request in the sum."""
        due, coming = next_sync(state.sync, state.coming, word)
        covered = state.covered + self.course.steps_in_round(state.covered, state.sync.period)
        return _State(covered, due or state.sync, coming)

    def _sum_of(self, member: _Member, sync: Sync) -> StepSum:
        """Return the sum of the current step; the first member that is ready creates it."""
        if member.done not in self._sums:
            setting = Setting(self.clock, self.network, self.links, self._owner, self.members)
            units = member.at_hand.microbatches
            self._sums[member.done] = StepSum(
                setting, member.done, units, sync, self.numbers, self._hold, self._landed
            )
        return self._sums[member.done]

    def _hold(self, step_sum: StepSum, rank: int) -> None:
        member = self._group[rank]
        member.at_hand.result_digest = step_sum.digest
        newest = self.generation + (set(self.members) != self._next_members)
        step_sum.say(rank, newest)

    def _landed(self, rank: int) -> None:
        self._wake(self._group[rank])

    def _await(self, member: _Member, pending_step: PendingStep) -> None:
        member.is_waiting = True
        if pending_step.has_ended:
            self._wake(member)

    def _wake(self, member: _Member) -> None:
        """Wake a member whose pending step has ended; a computing member notices after its unit."""
        if member.is_waiting and member.is_alive and member.pending_step is not None:
            self._complete(member, member.pending_step)

    def _complete(self, member: _Member, pending_step: PendingStep) -> None:
        """Complete the pending step like `StepLoop.wait_in_flight` does."""
        member.pending_step, member.is_waiting = None, False
        if pending_step.has_failed:
            self._meet(member)
            return
        rank = self._ranks[member.machine]
        self._apply(member, pending_step.words, partial(self._deal, member.done + 1, rank))
        member.reported_speed, member.busy_s, member.samples = pending_step.words[rank].speed, 0.0, 0
        self.clock.later(self.costs.commit_s, partial(self._follow_up, member, pending_step.words))

    def _follow_up(self, member: _Member, words: Sequence[CommitVote]) -> None:
        if not member.is_alive:
            return
        if is_newer_group_known(words, self.generation):
            self._meet(member)
        else:
            self._go_on(member)

    def _apply(self, member: _Member, words: Sequence[CommitVote], deal: Assign) -> None:
        """Apply the result of the step. ``words``: received votes; empty if the group failed before that."""
        if member.done + 1 not in self._states:
            self._count(self._sums[member.done], words)
        member.done += 1
        member.at_hand.commit(partial(self._units, self._states[member.done]), deal)

    def _count(self, step_sum: StepSum, words: Sequence[CommitVote]) -> None:
        """Count the step as committed, which the first member that applies it does."""
        self.ledger.commit(step_sum.units, step_sum.parts)
        if words:
            self.pace.update([word.speed for word in words], 0)
        step, state = step_sum.step, self._states[step_sum.step]
        self._states = {step: state, step + 1: self._after(state, step_sum.wish)}
        del self._sums[step]
        now, batches = self.clock.now, self._states[step + 1].covered - state.covered
        made = Committed(
            now, batches, len(self.members), state.sync, now - self._last_commit, self._computing_s
        )
        self._last_commit, self._computing_s = now, 0.0
        self.commits.append(made)
        for notice in self.on_commit:
            notice(made)


@lru_cache(maxsize=4)
def _units(course: DataOrder, covered: int, period: int) -> tuple[MicroBatch, ...]:
    return course.micro_batches(covered, period)


def _remembered_lease(
    units: Sequence[MicroBatch],
    claimed: Mapping[int, frozenset[int]],
    shares: Sequence[float],
    tried: frozenset[int],
) -> Assignment:
    """Return a cached `lease`: thousands of members take seconds, and steps are often divided alike."""
    span = units[-1].last - units[0].first
    return _leased(span, units[0].size, tuple(claimed.items()), tuple(shares), tried)


@lru_cache(maxsize=16)
def _leased(
    span: int,
    unit: int,
    claimed: tuple[tuple[int, frozenset[int]], ...],
    shares: tuple[float, ...],
    tried: frozenset[int],
) -> Assignment:
    return assign_micro_batches(cut_micro_batches(0, span, unit), dict(claimed), shares, tried)


def _nothing(units: Sequence[MicroBatch], claimed: Mapping[int, frozenset[int]]) -> list[MicroBatch]:
    """Assign nothing to a member that is between two groups: the next group assigns."""
    return []
