"""Paxos: a chain of decisions, each decided by single-decree Paxos among the voters of the one before. Pure.

Nothing here knows what is decided. A reply that promises or accepts comes with an acceptor state, which must
be on disk before the reply is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from barnraise.membership.consensus.quorum import is_quorum

RawNode = Annotated[bytes, Meta(min_length=32, max_length=32)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
MOST_VOTERS = 1024
BRANCH_BITS = 16  # of a branch's number are chance, so that two that are opened apart are never one
_MOST_PAYLOAD = 512 * 1024


class PaxosBallot(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Ballot number, ordered by round. The proposer's node makes it unique."""

    round: Count
    node: RawNode


class ChainPosition(NamedTuple):
    """Position of a decision in its chain.

    A higher branch beats any number. Only the user opens a branch.
    """

    branch: int
    number: int


class PaxosDecision(msgspec.Struct, frozen=True, array_like=True):
    """One link of a chain. ``voters``, most senior first, decide the next one."""

    branch: Count
    number: Count
    previous: Digest
    voters: Annotated[tuple[RawNode, ...], Meta(max_length=MOST_VOTERS)]
    payload: Annotated[bytes, Meta(max_length=_MOST_PAYLOAD)]

    @property
    def position(self) -> ChainPosition:
        """Return the position in the chain."""
        return ChainPosition(self.branch, self.number)

    @property
    def digest(self) -> bytes:
        """Return the hash by which the next decision names this one."""
        return hashlib.sha3_256(b"barnraise decision 1" + msgspec.msgpack.encode(self)).digest()


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """Decision that an acceptor accepted, with its ballot."""

    ballot: PaxosBallot
    decision: PaxosDecision


class AcceptorState(msgspec.Struct, frozen=True, array_like=True):
    """State of an acceptor that must survive a crash. ``digest`` is that of ``decided``."""

    decided: PaxosDecision
    digest: Digest
    promised: PaxosBallot | None = None
    accepted: Vote | None = None


class PaxosPrepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """Phase 1 request: ask for a promise about the decision after ``after``."""

    after: Digest
    ballot: PaxosBallot


class PaxosPromise(msgspec.Struct, frozen=True, array_like=True, tag="promise"):
    """Phase 1 reply: a promise, with the vote that was given before, if any."""

    after: Digest
    ballot: PaxosBallot
    accepted: Vote | None


class PaxosAccept(msgspec.Struct, frozen=True, array_like=True, tag="accept"):
    """Phase 2 request: ask to accept this decision."""

    ballot: PaxosBallot
    decision: PaxosDecision


class PaxosAccepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """Phase 2 reply: the vote is on disk. The signature is over the decision and the ballot."""

    after: Digest
    ballot: PaxosBallot
    signature: Signature


class PaxosReject(msgspec.Struct, frozen=True, array_like=True, tag="refuse"):
    """Reply to either request: a higher ballot was promised already."""

    after: Digest
    ballot: PaxosBallot
    promised: PaxosBallot


Question = PaxosPrepare | PaxosAccept
Reply = PaxosPromise | PaxosAccepted | PaxosReject


class PaxosReply(NamedTuple):
    """Reply of an acceptor. ``record`` is to be saved before ``reply`` is sent; None if nothing changed."""

    reply: Reply | None
    record: AcceptorState | None


class VoteSigner(Protocol):
    """Signature of this node for a vote."""

    def __call__(self, digest: bytes, ballot: PaxosBallot) -> bytes: ...


def founded(decision: PaxosDecision) -> AcceptorState:
    """Return the acceptor state of a chain whose newest decision is this one."""
    return AcceptorState(decided=decision, digest=decision.digest)


def answer_prepare(record: AcceptorState, me: bytes, question: PaxosPrepare) -> PaxosReply:
    """Answer a prepare request.

    There is no reply if the request is not about the next decision of this chain.
    """
    if question.after != record.digest or me not in record.decided.voters:
        return PaxosReply(None, None)
    if question.ballot.node not in record.decided.voters:
        return PaxosReply(None, None)
    if record.promised is not None and question.ballot < record.promised:
        return PaxosReply(PaxosReject(question.after, question.ballot, record.promised), None)
    kept = None
    if question.ballot != record.promised:
        kept = msgspec.structs.replace(record, promised=question.ballot)
    return PaxosReply(PaxosPromise(question.after, question.ballot, record.accepted), kept)


def answer_accept(record: AcceptorState, me: bytes, question: PaxosAccept, sign: VoteSigner) -> PaxosReply:
    """Answer an accept request. The caller has checked the content of the decision."""
    after = question.decision.previous
    if after != record.digest or me not in record.decided.voters:
        return PaxosReply(None, None)
    if question.ballot.node not in record.decided.voters or not follows(record.decided, question.decision):
        return PaxosReply(None, None)
    if record.promised is not None and question.ballot < record.promised:
        return PaxosReply(PaxosReject(after, question.ballot, record.promised), None)
    vote = Vote(question.ballot, question.decision)
    kept = msgspec.structs.replace(record, promised=question.ballot, accepted=vote)
    signature = sign(question.decision.digest, question.ballot)
    return PaxosReply(PaxosAccepted(after, question.ballot, signature), kept if kept != record else None)


def follows(last: PaxosDecision, decision: PaxosDecision) -> bool:
    """Return True if the decision has the next position, possibly on a branch that the user opened."""
    opened = decision.branch >> BRANCH_BITS == (last.branch >> BRANCH_BITS) + 1
    return decision.number == last.number + 1 and (decision.branch == last.branch or opened)


def new_branch(last: PaxosDecision, chance: int) -> int:
    """Return the number of a branch that the user opens after this decision."""
    return ((last.branch >> BRANCH_BITS) + 1 << BRANCH_BITS) + chance % (1 << BRANCH_BITS)


class PaxosProposal:
    """One attempt of one proposer to get the next decision made."""

    def __init__(
        self, record: AcceptorState, ballot: PaxosBallot, wish: PaxosDecision, absent: frozenset[bytes]
    ) -> None:
        self.ballot = ballot
        self.after = record.digest
        self.voters = record.decided.voters
        self.decision = wish
        self.wish = wish
        self.absent = absent
        self.accepting = False
        self._promised: set[bytes] = set()
        self._accepted: dict[bytes, bytes] = {}
        self._highest: PaxosBallot | None = None

    def prepare(self) -> PaxosPrepare:
        """Return the request of phase 1."""
        return PaxosPrepare(self.after, self.ballot)

    def promised(self, sender: bytes, promise: PaxosPromise) -> PaxosAccept | None:
        """Count a promise; return the request of phase 2 once a quorum has promised, else None."""
        if promise.ballot != self.ballot or promise.after != self.after or self.accepting:
            return None
        self._promised.add(sender)
        vote = promise.accepted
        if vote is not None and self.absent and vote.decision.branch < self.wish.branch:
            vote = None  # the user's word opens a branch: what the old one may have decided does not bind it
        if vote is not None and (self._highest is None or vote.ballot > self._highest):
            # It may be decided already: then no other decision may follow.
            self._highest, self.decision = vote.ballot, vote.decision
        if not is_quorum(self.voters, self._promised, self.absent):
            return None
        self.accepting = True
        return PaxosAccept(self.ballot, self.decision)

    def accepted(self, sender: bytes, answer: PaxosAccepted) -> bool:
        """Count a vote whose signature was checked; return True if it completed the quorum."""
        if answer.ballot != self.ballot or answer.after != self.after:
            return False
        self._accepted[sender] = answer.signature
        return self.accepting and is_quorum(self.voters, self._accepted, self.absent)

    @property
    def signatures(self) -> dict[bytes, bytes]:
        """Return the signatures of the votes, by node."""
        return dict(self._accepted)

    @property
    def silent(self) -> tuple[bytes, ...]:
        """Return the voters without a reply, most senior first."""
        have: Collection[bytes] = self._accepted if self.accepting else self._promised
        return tuple(node for node in self.voters if node not in have and node not in self.absent)
