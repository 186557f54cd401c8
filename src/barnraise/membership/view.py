"""View: the agreed set of agents, most senior first, and the rule for the next one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError, TrustError
from barnraise.identity import NodeId
from barnraise.identity.keys import verify_signature
from barnraise.membership.consensus.paxos import MOST_VOTERS, PaxosDecision, RawNode, Signature, new_branch

IncarnationId = Annotated[bytes, Meta(min_length=16, max_length=16)]
_NOTHING = bytes(32)
_DECLARATION = b"barnraise branch 1\0"


class PresentMember(msgspec.Struct, frozen=True, array_like=True):
    """Member of a view: its node, its incarnation, whether it votes and takes work."""

    node: RawNode
    incarnation: IncarnationId
    votes: bool = True
    works: bool = True


class BranchDeclaration(msgspec.Struct, frozen=True, array_like=True):
    """Statement of a person that voters are gone, signed by the machine where it was typed."""

    node: RawNode
    signature: Signature


class MembershipView(msgspec.Struct, frozen=True, array_like=True):
    """Content of one decision of the cluster's chain. ``entries`` extend the trust log from ``log_from``."""

    members: Annotated[tuple[PresentMember, ...], Meta(max_length=MOST_VOTERS)]
    log_from: Annotated[int, Meta(ge=0, le=4096)]
    entries: Annotated[tuple[Annotated[bytes, Meta(max_length=4096)], ...], Meta(max_length=64)]
    without: Annotated[tuple[RawNode, ...], Meta(max_length=MOST_VOTERS)] = ()
    why: Annotated[str, Meta(max_length=500)] = ""
    declaration: BranchDeclaration | None = None

    def of(self, node: bytes) -> PresentMember | None:
        """Return the member with this node id, or None."""
        return next((member for member in self.members if member.node == node), None)

    @property
    def log_length(self) -> int:
        """Return the length of the trust log after this view."""
        return self.log_from + len(self.entries)

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
    """Return the decision that makes this the next view.

    A view without absent voters opens a branch.
    """
    branch, number = (last.branch, last.number) if last is not None else (0, 0)
    return PaxosDecision(
        branch=new_branch(last, chance) if view.without and last is not None else branch,
        number=number + 1,
        previous=previous,
        voters=view.voters,
        payload=_encoder.encode(view),
    )


def first(node: bytes, incarnation: bytes, log_length: int) -> PaxosDecision:
    """Return the first view of a cluster that this node has just founded."""
    view = MembershipView((PresentMember(node, incarnation),), log_length, (), why="the cluster was founded")
    return decide(None, _NOTHING, view)


def nowhere() -> PaxosDecision:
    """Return the decision of a node that was paired but knows no view yet."""
    return PaxosDecision(
        branch=0, number=0, previous=_NOTHING, voters=(), payload=_encoder.encode(MembershipView((), 0, ()))
    )


def read_view(decision: PaxosDecision) -> MembershipView:
    """Decode the view of a decision.

    Raise ProtocolError if its voters are not those of the decision.
    """
    view = decode(_decoder, decision.payload, "a view cannot be read")
    if view.voters != decision.voters or len(set(view.nodes)) != len(view.members):
        raise ProtocolError("a view contradicts itself")
    return view


def declaration_text(previous: bytes, absent: Collection[bytes]) -> bytes:
    """Return the bytes that a person's machine signs to open a branch after a decision."""
    return _DECLARATION + _encoder.encode((previous, sorted(absent)))


def check_branch(before: PaxosDecision, decision: PaxosDecision, view: MembershipView) -> None:
    """Raise TrustError unless a decision stays on its branch, or a person's machine declared a new one."""
    declaration = view.declaration
    if decision.branch == before.branch:
        if view.without or declaration is not None:
            raise TrustError("a decision declares machines gone, but opens no branch")
        return
    if not view.without or declaration is None:
        raise TrustError("a decision opens a branch, but names no machine that is gone")
    if declaration.node not in before.voters or declaration.node in view.without:
        raise TrustError("a branch is declared by a machine that may not do it")
    text = declaration_text(decision.previous, view.without)
    if not verify_signature(NodeId(declaration.node), declaration.signature, text):
        raise TrustError("the declaration of a branch has a wrong signature")


class WantedChange(msgspec.Struct, frozen=True):
    """Changes that the coordinator knows and the view does not have yet."""

    dead: Collection[bytes]
    leaving: Collection[bytes]
    arrived: Mapping[bytes, PresentMember]
    entries: tuple[bytes, ...]
    log_length: int
    absent: tuple[bytes, ...] = ()
    rotated: Mapping[bytes, bytes] = {}


def next_view(view: MembershipView, wanted: WantedChange) -> MembershipView | None:
    """Return the view that should follow, or None if the current one is right.

    Members that stay keep their seniority, also with a new key. Members that return, also as a new
    incarnation, go last.
    """
    removed = {*wanted.dead, *wanted.leaving}
    reasons = []
    stay: list[PresentMember] = []
    back: list[PresentMember] = []
    for member in view.members:
        here = wanted.arrived.get(member.node)
        if member.node in wanted.rotated and member.node not in removed:
            stay.append(msgspec.structs.replace(member, node=wanted.rotated[member.node]))
        elif (
            here is not None and here.incarnation != member.incarnation and member.node not in wanted.leaving
        ):
            back.append(here)
        elif member.node in removed:
            reasons.append(("left" if member.node in wanted.leaving else "died", member.node))
        elif here is not None and here != member:
            stay.append(here)
        else:
            stay.append(member)
    fresh = [
        here
        for node, here in wanted.arrived.items()
        if view.of(node) is None and node not in wanted.leaving and node not in wanted.rotated
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
        names = [node.hex()[:8] for reason, node in reasons if reason == what]
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            parts.append(f"{', '.join(names[:4])}{more} {what}")
    if wanted.entries:
        parts.append(f"{len(wanted.entries)} new in the trust log")
    if wanted.absent:
        parts.append("the user declared machines gone")
    return "; ".join(parts) or "roles changed"
