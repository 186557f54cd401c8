"""Certificates: only the signatures of a quorum of the voters before prove a decision."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from barnraise.core.errors import TrustError
from barnraise.identity import NodeKey
from barnraise.membership.consensus.certificate import (
    CertifiedDecision,
    DecisionCertificate,
    SignedVote,
    check_link,
    vote_text,
)
from barnraise.membership.consensus.paxos import PaxosBallot, PaxosDecision, new_branch

KEYS = [NodeKey.generate() for _ in range(4)]
NODES = tuple(key.id.raw for key in KEYS)
FIRST = PaxosDecision(0, 1, bytes(32), NODES, b"first")
NEXT = PaxosDecision(0, 2, FIRST.digest, NODES, b"next")
BALLOT = PaxosBallot(1, NODES[0])


def _certified(
    signers: Iterable[NodeKey], decision: PaxosDecision = NEXT, ballot: PaxosBallot = BALLOT
) -> CertifiedDecision:
    text = vote_text(decision.digest, ballot)
    votes = tuple(SignedVote(key.id.raw, key.sign(text)) for key in signers)
    return CertifiedDecision(decision, DecisionCertificate(ballot, votes))


def _check(link: CertifiedDecision, absent: Iterable[bytes] = ()) -> None:
    check_link(FIRST, FIRST.digest, link, tuple(absent))


@pytest.mark.parametrize("signers", [KEYS[:2], KEYS[:3], KEYS[1:]])
def test_link_signed_by_quorum_is_accepted(signers: list[NodeKey]) -> None:
    _check(_certified(signers))


@pytest.mark.parametrize("signers", [[], KEYS[:1], KEYS[1:3]])
def test_link_signed_by_fewer_is_rejected(signers: list[NodeKey]) -> None:
    with pytest.raises(TrustError, match="no quorum"):
        _check(_certified(signers))


def test_link_signed_twice_by_one_voter_is_rejected() -> None:
    with pytest.raises(TrustError, match="could not vote"):
        _check(_certified([KEYS[1], KEYS[1], KEYS[2]]))


def test_link_signed_by_stranger_is_rejected() -> None:
    with pytest.raises(TrustError, match="could not vote"):
        _check(_certified([KEYS[0], KEYS[1], NodeKey.generate()]))


def test_link_without_certificate_is_rejected() -> None:
    with pytest.raises(TrustError, match="no certificate"):
        _check(CertifiedDecision(NEXT))


def test_votes_for_another_decision_or_ballot_are_rejected() -> None:
    other = PaxosDecision(0, 2, FIRST.digest, NODES, b"other")
    votes = _certified(KEYS, other).certificate
    with pytest.raises(TrustError, match="wrong signature"):
        _check(CertifiedDecision(NEXT, votes))
    votes = _certified(KEYS, NEXT, PaxosBallot(2, NODES[0])).certificate
    assert votes is not None
    with pytest.raises(TrustError, match="wrong signature"):
        _check(CertifiedDecision(NEXT, DecisionCertificate(BALLOT, votes.votes)))


def test_link_that_skips_or_follows_another_is_rejected() -> None:
    for decision in (
        PaxosDecision(0, 3, FIRST.digest, NODES, b""),
        PaxosDecision(0, 2, bytes(32), NODES, b""),
        PaxosDecision(2 << 16, 2, FIRST.digest, NODES, b""),
    ):
        with pytest.raises(TrustError, match="does not follow"):
            _check(_certified(KEYS, decision))


def test_branch_needs_a_quorum_of_the_voters_that_are_not_gone() -> None:
    branch = PaxosDecision(new_branch(FIRST, 7), 2, FIRST.digest, NODES[2:], b"branch")
    _check(_certified(KEYS[2:3], branch, PaxosBallot(1, NODES[2])), NODES[:2])
    with pytest.raises(TrustError, match="no quorum"):
        _check(_certified(KEYS[3:], branch, PaxosBallot(1, NODES[3])), NODES[:2])
