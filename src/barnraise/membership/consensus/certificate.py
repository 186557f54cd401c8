"""Certificate: the signed votes of a quorum that prove one decision, and their verification. Pure.

A machine that was away believes a decision only with a certificate. A quorum of the voters of the decision
before has signed it. A machine that was removed cannot make one by itself.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.errors import TrustError
from barnraise.identity import NodeId
from barnraise.identity.keys import verify_signature
from barnraise.membership.consensus.paxos import (
    MOST_VOTERS,
    Digest,
    PaxosBallot,
    PaxosDecision,
    RawNode,
    Signature,
    follows,
)
from barnraise.membership.consensus.quorum import is_quorum

_DOMAIN = b"barnraise vote 1\0"


class SignedVote(msgspec.Struct, frozen=True, array_like=True):
    """Vote of one node, signed with its node key."""

    node: RawNode
    signature: Signature


class DecisionCertificate(msgspec.Struct, frozen=True, array_like=True):
    """Votes of a quorum for one decision, all in one ballot."""

    ballot: PaxosBallot
    votes: Annotated[tuple[SignedVote, ...], Meta(max_length=MOST_VOTERS)]

    @property
    def signers(self) -> frozenset[bytes]:
        """Return the nodes that are named as signers."""
        return frozenset(vote.node for vote in self.votes)


class CertifiedDecision(msgspec.Struct, frozen=True, array_like=True):
    """Decision with its certificate. Only the first one that a node knows may lack it."""

    decision: PaxosDecision
    certificate: DecisionCertificate | None = None

    @property
    def signers(self) -> frozenset[bytes]:
        """Return the nodes that signed; none without a certificate."""
        return self.certificate.signers if self.certificate is not None else frozenset()


def vote_text(digest: Digest, ballot: PaxosBallot) -> bytes:
    """Return the bytes that a voter signs: the decision's digest and the ballot."""
    return _DOMAIN + msgspec.msgpack.encode((digest, ballot))


@lru_cache(maxsize=4096)
def is_vote_signed(vote: SignedVote, text: bytes) -> bool:
    """Return True if the node of the vote signed this text."""
    return verify_signature(NodeId(vote.node), vote.signature, text)


def check_link(
    before: PaxosDecision, digest: Digest, link: CertifiedDecision, absent: Collection[bytes]
) -> None:
    """Raise TrustError unless a certificate proves that a decision follows the one before.

    ``digest``: of the decision before. ``absent``: voters that the decision declares gone.
    """
    decision, certificate = link.decision, link.certificate
    if decision.previous != digest or not follows(before, decision):
        raise TrustError("a decision does not follow the one before it")
    if certificate is None:
        raise TrustError("a decision has no certificate")
    signers = certificate.signers & frozenset(before.voters)
    if certificate.ballot.node not in before.voters or len(certificate.votes) != len(signers):
        raise TrustError("the certificate of a decision names machines that could not vote")
    if not is_quorum(before.voters, signers) and not is_quorum(before.voters, signers, absent):
        raise TrustError(f"a decision is signed by {len(signers)} of {len(before.voters)} voters, no quorum")
    text = vote_text(decision.digest, certificate.ballot)
    for vote in certificate.votes:
        if not is_vote_signed(vote, text):
            raise TrustError(f"the vote of {NodeId(vote.node).short} for a decision has a wrong signature")
