"""The commit of steps under random deaths, evictions of the living and joins: atomic, and exactly once.

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

COURSE = DataOrder(samples=64, batch=16, micro_batch_size=3, seed=5)


@dataclass
class Member:
    """One worker: what it applied, what it holds, what is in its sums."""

    name: int
    fresh: bool = True
    history: list[bytes] = field(default_factory=list)  # the digest of each step that it applied
    held: bytes = b""
    units: set[int] = field(default_factory=set)
    pending: list[int] = field(default_factory=list)
    offered: bool = False  # the sum of the step is on its way; what is pending is of the next one
    ahead: set[int] = field(default_factory=set)
    aheads: dict[int, frozenset[int]] = field(default_factory=dict)  # of each rank, when the group began
    group: int = -1
    heard: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (step, who) holds which result
    words: dict[int, MemberState] = field(default_factory=dict)
    ready: bool = False  # has concluded on entering its group

    def word(self) -> MemberState:
        ahead = tuple(sorted(self.ahead))
        return MemberState(self.fresh, len(self.history), self.held, tuple(sorted(self.units)), ahead=ahead)


class World:
    """All members, living and dead, and the messages between them."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.members: dict[int, Member] = {}
        self.groups: list[list[int]] = []
        self.alive: set[int] = set()
        self.mail: list[tuple[int, int, str, int, object]] = []
        self.applied: dict[int, bytes] = {}  # the one result of each step, once anybody applied it
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
            member.heard, member.words = {}, {}
            for other in names:
                self.mail.append((name, other, "word", number, member.word()))

    def deliver(self) -> None:
        place = self.chance.randrange(len(self.mail))
        sender, receiver, kind, group, content = self.mail.pop(place)
        member = self.members[receiver]
        if receiver not in self.alive or member.group != group:
            return
        if kind == "word":
            member.words[sender] = content  # type: ignore[assignment]
            if len(member.words) == len(self.groups[group]):
                self.enter(member)
        elif kind == "held":
            step, digest = content  # type: ignore[misc]
            member.heard[step, sender] = digest
            self.try_commit(member)

    def enter(self, member: Member) -> None:
        names = self.groups[member.group]
        verdict = decide_commit([member.words[name] for name in names])
        rank = names.index(member.name)
        if verdict.apply and not member.fresh and len(member.history) < verdict.done:
            self.apply(member, member.held)
            member.ahead = set()  # they are units of the step at hand now
        if member.fresh:  # healed by the donors, whose state all conclude the same about
            source = [name for name in names if not member.words[name].fresh]
            longest: list[bytes] = []
            for name in source:
                past = self.members[name].history[: verdict.done]
                longest = max(longest, past, key=len)
            while len(longest) < verdict.done:
                longest = [*longest, self.members[source[0]].held]
            member.history, member.fresh = list(longest), False
        member.held, member.ready, member.offered = b"", True, False
        member.units = set(verdict.claimed[rank])
        member.aheads = dict(enumerate(verdict.ahead))
        member.pending = self.dealt(member, len(member.history), dict(enumerate(verdict.claimed)))

    def dealt(self, member: Member, step: int, claimed: dict[int, frozenset[int]]) -> list[int]:
        names = self.groups[member.group]
        found = assign_micro_batches(COURSE.micro_batches(step), claimed, [1.0] * len(names))
        return list(found[names.index(member.name)])

    def compute(self, name: int) -> None:
        """One unit; after the last one the sum is offered to the group, and the next step begins."""
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
        member.pending = self.dealt(member, step + 1, member.aheads)
        member.aheads = {}
        offers = self.sums.setdefault((member.group, step), {})
        offers[name] = frozenset(member.units)
        if len(offers) == len(self.groups[member.group]):
            self.reduced(member.group, step, offers)

    def reduced(self, group: int, step: int, offers: dict[int, frozenset[int]]) -> None:
        """The all-reduce succeeds for some and may break for others."""
        every = sorted(unit for units in offers.values() for unit in units)
        assert every == [unit.number for unit in COURSE.micro_batches(step)], "each unit once in every sum"
        digest = f"{step}/{group}".encode()
        for name in self.groups[group]:
            member = self.members[name]
            if name in self.alive and member.group == group and self.chance.random() < 0.9:
                member.held = digest
                for other in self.groups[group]:
                    self.mail.append((name, other, "held", group, (step, digest)))

    def try_commit(self, member: Member) -> None:
        names = self.groups[member.group]
        said = [member.heard.get((len(member.history), name)) for name in names]
        if member.held and None not in said:
            assert set(said) == {member.held}
            self.apply(member, member.held)
            member.held, member.offered = b"", False
            member.units, member.ahead = member.ahead, set()

    def apply(self, member: Member, digest: bytes) -> None:
        step = len(member.history)
        known = self.applied.setdefault(step, digest)
        # An evicted member may have applied what nobody else ever will; it is never a donor again.
        if member.name in self.groups[-1]:
            assert known == digest, f"step {step} was applied with two results"
        member.history.append(digest)


@pytest.mark.parametrize("block", range(10))
def test_commit_is_atomic_and_exactly_once(block: int) -> None:
    """Run a thousand random schedules."""
    for schedule in range(1000):
        _play(random.Random(block * 1000 + schedule))


def _any_holder_decides(words: Sequence[MemberState]) -> CommitDecision:
    """Wrong: a result that one survivor holds proves nothing about the others."""
    verdict = commit.decide_commit(words)
    is_held = any(word.held and not word.fresh for word in words)
    return replace(verdict, done=verdict.done + 1, apply=True) if is_held and not verdict.apply else verdict


def _no_member_applies(words: Sequence[MemberState]) -> CommitDecision:
    """Wrong: a member may have applied the result that all survivors hold."""
    verdict = commit.decide_commit(words)
    return replace(verdict, done=verdict.done - 1, apply=False) if verdict.apply else verdict


def _claims_are_forgotten(words: Sequence[MemberState]) -> CommitDecision:
    """Wrong: micro-batches in a member's gradients are assigned again."""
    return replace(commit.decide_commit(words), claimed=tuple(frozenset[int]() for _ in words))


def _work_ahead_is_forgotten(words: Sequence[MemberState]) -> CommitDecision:
    """Wrong: only the member itself remembers them, and the others assign the same micro-batches again."""
    return replace(commit.decide_commit(words), ahead=tuple(frozenset[int]() for _ in words))


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
            _play(random.Random(schedule))
        except (AssertionError, ProtocolError):
            return
    pytest.fail("a thousand schedules did not find it")


def _play(chance: random.Random) -> None:
    world = World(chance)
    world.regroup([world.new() for _ in range(chance.randint(1, 4))])
    for _ in range(chance.randint(40, 160)):
        group = world.groups[-1]
        happening = chance.random()
        if happening < 0.55 and world.mail:
            world.deliver()
        elif happening < 0.93:
            world.compute(chance.choice(group))
        elif happening < 0.96 and len(group) > 1:
            victim = chance.choice(group)
            world.alive.discard(victim)
            _next_group(world, [name for name in group if name != victim])
        elif happening < 0.98 and len(group) > 1:
            evicted = chance.choice(group)  # alive, but nobody hears it
            _next_group(world, [name for name in group if name != evicted])
        elif len(group) < 6:
            _next_group(world, [*group, world.new()])
    ends = {tuple(world.members[name].history) for name in world.groups[-1] if world.members[name].ready}
    longest = max(ends, key=len, default=())
    assert all(longest[: len(end)] == end for end in ends), "one history"


def _next_group(world: World, names: list[int]) -> None:
    has_state = {name for name, member in world.members.items() if not member.fresh}
    if has_state and not has_state & set(names):
        return  # nobody with the state would be left: the run waits instead
    world.regroup(names)
