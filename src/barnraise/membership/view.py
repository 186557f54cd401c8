"""The view: the agreed set of agents, most senior first; and how the next one follows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError
from barnraise.membership.paxos import MOST_VOTERS, PaxosDecision, RawNode, is_quorum, new_branch

IncarnationId = Annotated[bytes, Meta(min_length=16, max_length=16)]
_NOTHING = bytes(32)


class PresentMember(msgspec.Struct, frozen=True, array_like=True):
    """A member: which node, in which incarnation, whether it votes, whether it takes work."""

    node: RawNode
    incarnation: IncarnationId
    votes: bool = True
    works: bool = True


class MembershipView(msgspec.Struct, frozen=True, array_like=True):
    """What one decision of the cluster's chain says. ``entries`` extend the trust log from ``log_from``."""

    members: Annotated[tuple[PresentMember, ...], Meta(max_length=MOST_VOTERS)]
    log_from: Annotated[int, Meta(ge=0, le=4096)]
    entries: Annotated[tuple[Annotated[bytes, Meta(max_length=4096)], ...], Meta(max_length=64)]
    without: Annotated[tuple[RawNode, ...], Meta(max_length=MOST_VOTERS)] = ()
    why: Annotated[str, Meta(max_length=500)] = ""

    def of(self, node: bytes) -> PresentMember | None:
        return next((member for member in self.members if member.node == node), None)

    @property
    def nodes(self) -> tuple[bytes, ...]:
        return tuple(member.node for member in self.members)

    @property
    def voters(self) -> tuple[bytes, ...]:
        return tuple(member.node for member in self.members if member.votes)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(MembershipView)


def decide(
    last: PaxosDecision | None, previous: bytes, view: MembershipView, chance: int = 0
) -> PaxosDecision:
    """The decision that would make this the next view; without somebody it opens a branch."""
    branch, number = (last.branch, last.number) if last is not None else (0, 0)
    return PaxosDecision(
        branch=new_branch(last, chance) if view.without and last is not None else branch,
        number=number + 1,
        previous=previous,
        voters=view.voters,
        payload=_encoder.encode(view),
    )


def first(node: bytes, incarnation: bytes, log_length: int) -> PaxosDecision:
    """The first view of a cluster that this node has just founded."""
    view = MembershipView((PresentMember(node, incarnation),), log_length, (), why="the cluster was founded")
    return decide(None, _NOTHING, view)


def nowhere() -> PaxosDecision:
    """What a node holds that has been paired but has heard of no view yet."""
    return PaxosDecision(
        branch=0, number=0, previous=_NOTHING, voters=(), payload=_encoder.encode(MembershipView((), 0, ()))
    )


def read_view(decision: PaxosDecision) -> MembershipView:
    """ProtocolError if it is not a view whose voters are those that decide next."""
    view = decode(_decoder, decision.payload, "a view cannot be read")
    if view.voters != decision.voters or len(set(view.nodes)) != len(view.members):
        raise ProtocolError("a view contradicts itself")
    return view


def coordinator(view: MembershipView, dead: Collection[bytes]) -> tuple[bytes | None, str]:
    """The most senior voter who is not known to be dead, and why it is that one."""
    passed = 0
    for member in view.members:
        if member.votes and member.node not in dead:
            if passed:
                return member.node, f"the {passed} more senior do not answer"
            return member.node, "the most senior member"
        passed += member.votes
    return None, "no voter answers"


class WantedChange(msgspec.Struct, frozen=True):
    """What the coordinator knows that is not in the view yet."""

    dead: Collection[bytes]
    leaving: Collection[bytes]
    arrived: Mapping[bytes, PresentMember]
    entries: tuple[bytes, ...]
    log_length: int
    absent: tuple[bytes, ...] = ()


def next_view(view: MembershipView, wanted: WantedChange) -> MembershipView | None:
    """The view that should follow, or None if this one is right. Who stays keeps its seniority; returners,
    new incarnations of members among them, go last."""
    gone = {*wanted.dead, *wanted.leaving}
    reasons = []
    stay: list[PresentMember] = []
    back: list[PresentMember] = []
    for member in view.members:
        here = wanted.arrived.get(member.node)
        if here is not None and here.incarnation != member.incarnation and member.node not in wanted.leaving:
            back.append(here)
        elif member.node in gone:
            reasons.append(("left" if member.node in wanted.leaving else "died", member.node))
        elif here is not None and here != member:
            stay.append(here)
        else:
            stay.append(member)
    fresh = [
        here for node, here in wanted.arrived.items() if view.of(node) is None and node not in wanted.leaving
    ]
    members = (*stay, *back, *sorted(fresh, key=lambda here: here.node))
    if members == view.members and not wanted.entries and not wanted.absent:
        return None
    if not any(member.votes for member in members):
        return None
    reasons += [("returned", member.node) for member in back] + [("joined", member.node) for member in fresh]
    return MembershipView(
        members, wanted.log_length, wanted.entries, wanted.absent, _sentence(reasons, wanted)
    )


def _sentence(reasons: list[tuple[str, bytes]], wanted: WantedChange) -> str:
    parts = []
    for what in ("died", "left", "returned", "joined"):
        who = [node.hex()[:8] for reason, node in reasons if reason == what]
        if who:
            more = f" and {len(who) - 4} more" if len(who) > 4 else ""
            parts.append(f"{', '.join(who[:4])}{more} {what}")
    if wanted.entries:
        parts.append(f"{len(wanted.entries)} new in the trust log")
    if wanted.absent:
        parts.append("by the user's word without the absent")
    return "; ".join(parts) or "roles changed"


class MemberStanding(msgspec.Struct, frozen=True):
    """Whether this side can decide, and if not, for whom it waits."""

    decides: bool
    missing: tuple[bytes, ...]
    needed: tuple[bytes, ...]


def standing(view: MembershipView, dead: Collection[bytes]) -> MemberStanding:
    """``needed``: the absent voters of whom one more (or the first of them) would make a quorum."""
    voters = view.voters
    live = [node for node in voters if node not in dead]
    missing = tuple(node for node in voters if node in dead)
    if is_quorum(voters, live):
        return MemberStanding(True, missing, ())
    enough = tuple(node for node in missing if is_quorum(voters, [*live, node]))
    return MemberStanding(False, missing, enough or missing)
