"""The commit of steps under random deaths, evictions of the living and joins: atomic and exactly once.

Members run as small state machines on one fake network. It delivers each message late, or never once an end
is dead. While an all-reduce is in flight, a member computes micro-batches of the next step.

Every event is followed by checks. No member applies two different results of a step. No member goes back.
Each applied step covers each micro-batch once, also after work ahead outlived its group.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from barnraise.core.errors import ProtocolError
from barnraise.runs import commit
from barnraise.runs.commit import CommitDecision, MemberState, decide_commit
from barnraise.runs.sharding import DataOrder, assign_micro_batches

DATA_ORDER = DataOrder(samples=64, batch=16, micro_batch_size=3, seed=5)


@dataclass
class Member:
    """One worker with its applied steps, the result that it holds, and the units in its sums."""

    name: int
    fresh: bool = True
    history: list[bytes] = field(default_factory=list)  # the digest of each step that it applied
    held: bytes = b""
    units: set[int] = field(default_factory=set)
    pending: list[int] = field(default_factory=list)
    offered: bool = False  # the all-reduce is in flight; pending micro-batches belong to the next step
    ahead: set[int] = field(default_factory=set)
    aheads: dict[int, frozenset[int]] = field(default_factory=dict)  # of each rank, when the group was formed
    group: int = -1
    received: dict[tuple[int, int], bytes] = field(
        default_factory=dict
    )  # digest of the result by (step, sender)
    votes: dict[int, MemberState] = field(default_factory=dict)
    ready: bool = False  # has decided on entering its group

    def vote(self) -> MemberState:
        ahead = tuple(sorted(self.ahead))
        return MemberState(self.fresh, len(self.history), self.held, tuple(sorted(self.units)), ahead=ahead)


class CommitSimulation:
    """All members, living and dead, and the messages between them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.members: dict[int, Member] = {}
        self.groups: list[list[int]] = []
        self.alive: set[int] = set()
        self.messages: list[tuple[int, int, str, int, object]] = []
        self.applied: dict[int, bytes] = {}  # the one result of each step, once a member has applied it
        self.sums: dict[tuple[int, int], dict[int, frozenset[int]]] = {}
        self.next_name = 0

    def new(self) -> int:
        name = self.next_name
        self.next_name += 1
        self.members[name] = Member(name)
        self.alive.add(name)
        return name

    def regroup(self, names: list[int]) -> None:
        """Start a new generation; a member outside of it was evicted, alive or not."""
        self.groups.append(names)
        number = len(self.groups) - 1
        for name in names:
            member = self.members[name]
            member.group, member.ready = number, False
            member.received, member.votes = {}, {}
            for other in names:
                self.messages.append((name, other, "vote", number, member.vote()))

    def deliver(self) -> None:
        place = self.rng.randrange(len(self.messages))
        sender, receiver, kind, group, content = self.messages.pop(place)
        member = self.members[receiver]
        if receiver not in self.alive or member.group != group:
            return
        if kind == "vote":
            member.votes[sender] = content  # type: ignore[assignment]
            if len(member.votes) == len(self.groups[group]):
                self.enter(member)
        elif kind == "held":
            step, digest = content  # type: ignore[misc]
            member.received[step, sender] = digest
            self.try_commit(member)

    def enter(self, member: Member) -> None:
        names = self.groups[member.group]
        decision = decide_commit([member.votes[name] for name in names])
        rank = names.index(member.name)
        if decision.apply and not member.fresh and len(member.history) < decision.done:
            self.apply(member, member.held)
            member.ahead = set()  # they belong to the current step now
        if member.fresh:  # recovers from members that all decide alike about their state
            source = [name for name in names if not member.votes[name].fresh]
            longest: list[bytes] = []
            for name in source:
                past = self.members[name].history[: decision.done]
                longest = max(longest, past, key=len)
            while len(longest) < decision.done:
                longest = [*longest, self.members[source[0]].held]
            member.history, member.fresh = list(longest), False
        member.held, member.ready, member.offered = b"", True, False
        member.units = set(decision.claimed[rank])
        member.aheads = dict(enumerate(decision.ahead))
        member.pending = self.assigned(member, len(member.history), dict(enumerate(decision.claimed)))

    def assigned(self, member: Member, step: int, claimed: dict[int, frozenset[int]]) -> list[int]:
        names = self.groups[member.group]
        assignment = assign_micro_batches(DATA_ORDER.micro_batches(step), claimed, [1.0] * len(names))
        return list(assignment[names.index(member.name)])

    def compute(self, name: int) -> None:
        """Compute one unit; after the last one offer the sum to the group and start the next step."""
        member = self.members[name]
        if not member.ready:
            return
        if member.pending:
            (member.ahead if member.offered else member.units).add(member.pending.pop())
            return
        if member.offered:
            return
        step = len(member.history)
        member.offered = True
        member.pending = self.assigned(member, step + 1, member.aheads)
        member.aheads = {}
        offers = self.sums.setdefault((member.group, step), {})
        offers[name] = frozenset(member.units)
        if len(offers) == len(self.groups[member.group]):
            self.finish_all_reduce(member.group, step, offers)

    def finish_all_reduce(self, group: int, step: int, offers: dict[int, frozenset[int]]) -> None:
        """Finish the all-reduce for some members; it may fail for others."""
        every = sorted(unit for units in offers.values() for unit in units)
        assert every == [unit.number for unit in DATA_ORDER.micro_batches(step)], (
            "each unit once in every sum"
        )
        digest = f"{step}/{group}".encode()
        for name in self.groups[group]:
            member = self.members[name]
            if name in self.alive and member.group == group and self.rng.random() < 0.9:
                member.held = digest
                for other in self.groups[group]:
                    self.messages.append((name, other, "held", group, (step, digest)))

    def try_commit(self, member: Member) -> None:
        names = self.groups[member.group]
        digests = [member.received.get((len(member.history), name)) for name in names]
        if member.held and None not in digests:
            assert set(digests) == {member.held}
            self.apply(member, member.held)
            member.held, member.offered = b"", False
            member.units, member.ahead = member.ahead, set()

    def apply(self, member: Member, digest: bytes) -> None:
        step = len(member.history)
        known = self.applied.setdefault(step, digest)
        # An evicted member may have applied a result that no other member applies; it never sends its state.
        if member.name in self.groups[-1]:
            assert known == digest, f"step {step} was applied with two results"
        member.history.append(digest)


@pytest.mark.parametrize("block", range(10))
def test_commit_is_atomic_and_exactly_once(block: int) -> None:
    """Run a thousand random schedules."""
    for schedule in range(1000):
        _run_schedule(random.Random(block * 1000 + schedule))


def _any_holder_decides(votes: Sequence[MemberState]) -> CommitDecision:
    """Wrong: a result that one survivor holds proves nothing about the others."""
    decision = commit.decide_commit(votes)
    is_held = any(vote.held and not vote.fresh for vote in votes)
    return (
        replace(decision, done=decision.done + 1, apply=True) if is_held and not decision.apply else decision
    )


def _no_member_applies(votes: Sequence[MemberState]) -> CommitDecision:
    """Wrong: a member may have applied the result that all survivors hold."""
    decision = commit.decide_commit(votes)
    return replace(decision, done=decision.done - 1, apply=False) if decision.apply else decision


def _claims_are_forgotten(votes: Sequence[MemberState]) -> CommitDecision:
    """Wrong: micro-batches in a member's gradients are assigned again."""
    return replace(commit.decide_commit(votes), claimed=tuple(frozenset[int]() for _ in votes))


def _work_ahead_is_forgotten(votes: Sequence[MemberState]) -> CommitDecision:
    """Wrong: only the member itself remembers them, and the others assign the same micro-batches again."""
    return replace(commit.decide_commit(votes), ahead=tuple(frozenset[int]() for _ in votes))


@pytest.mark.parametrize(
    "wrong", [_any_holder_decides, _no_member_applies, _claims_are_forgotten, _work_ahead_is_forgotten]
)
def test_wrong_commit_rule_is_detected(
    wrong: Callable[[Sequence[MemberState]], CommitDecision], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prove that the schedules can detect a wrong rule."""
    monkeypatch.setattr(sys.modules[__name__], "decide_commit", wrong)
    for schedule in range(1000):
        try:
            _run_schedule(random.Random(schedule))
        except (AssertionError, ProtocolError):
            return
    pytest.fail("a thousand schedules did not detect the wrong rule")


def _run_schedule(rng: random.Random) -> None:
    simulation = CommitSimulation(rng)
    simulation.regroup([simulation.new() for _ in range(rng.randint(1, 4))])
    for _ in range(rng.randint(40, 160)):
        group = simulation.groups[-1]
        draw = rng.random()
        if draw < 0.55 and simulation.messages:
            simulation.deliver()
        elif draw < 0.93:
            simulation.compute(rng.choice(group))
        elif draw < 0.96 and len(group) > 1:
            victim = rng.choice(group)
            simulation.alive.discard(victim)
            _next_group(simulation, [name for name in group if name != victim])
        elif draw < 0.98 and len(group) > 1:
            evicted = rng.choice(group)  # alive, but unreachable
            _next_group(simulation, [name for name in group if name != evicted])
        elif len(group) < 6:
            _next_group(simulation, [*group, simulation.new()])
    ends = {
        tuple(simulation.members[name].history)
        for name in simulation.groups[-1]
        if simulation.members[name].ready
    }
    longest = max(ends, key=len, default=())
    assert all(longest[: len(end)] == end for end in ends), "one history"


def _next_group(simulation: CommitSimulation, names: list[int]) -> None:
    has_state = {name for name, member in simulation.members.items() if not member.fresh}
    if has_state and not has_state & set(names):
        return  # no member would have the state: the run waits instead
    simulation.regroup(names)
