"""History: which decisions of others a node follows, and that a removal is final."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec
import pytest

from barnraise.core.errors import TrustError
from barnraise.identity import NodeId, NodeKey
from barnraise.identity.trust import TrustLog, encode_entry
from barnraise.membership.consensus.certificate import (
    CertifiedDecision,
    DecisionCertificate,
    SignedVote,
    vote_text,
)
from barnraise.membership.consensus.paxos import PaxosBallot, PaxosDecision, founded
from barnraise.membership.history import History, StoredHistory
from barnraise.membership.messages import DecisionMessage
from barnraise.membership.view import (
    BranchDeclaration,
    MembershipView,
    PresentMember,
    decide,
    declaration_text,
)

A, B, C, X = (NodeKey.generate() for _ in range(4))
OWNERS = (A, B, C, X)


def _log() -> TrustLog:
    log = TrustLog.found(A, "a")
    for key, name in ((B, "b"), (C, "c"), (X, "x")):
        log = log.extended(log.admit(A, key.id, "owner", name))
    return log


LOG = _log()


def _members(keys: Iterable[NodeKey]) -> tuple[PresentMember, ...]:
    return tuple(PresentMember(key.id.raw, bytes(16)) for key in keys)


FIRST = decide(None, bytes(32), MembershipView(_members(OWNERS), len(LOG.entries), ()))


def _history(first: PaxosDecision = FIRST) -> History:
    return History(StoredHistory(founded(first), LOG))


def _certified(decision: PaxosDecision, signers: Iterable[NodeKey]) -> CertifiedDecision:
    keys = list(signers)
    ballot = PaxosBallot(1, keys[0].id.raw)
    text = vote_text(decision.digest, ballot)
    votes = tuple(SignedVote(key.id.raw, key.sign(text)) for key in keys)
    return CertifiedDecision(decision, DecisionCertificate(ballot, votes))


def _next(
    history: History,
    members: Iterable[NodeKey],
    signers: Iterable[NodeKey],
    entries: tuple[bytes, ...] = (),
) -> CertifiedDecision:
    view = MembershipView(_members(members), len(history.log.entries), entries)
    return _certified(decide(history.decided, history.record.digest, view), signers)


def _branch(
    last: PaxosDecision, members: Iterable[NodeKey], by: NodeKey, absent: Iterable[NodeKey], log: TrustLog
) -> PaxosDecision:
    absent_nodes = tuple(sorted(key.id.raw for key in absent))
    declaration = BranchDeclaration(by.id.raw, by.sign(declaration_text(last.digest, absent_nodes)))
    view = MembershipView(_members(members), len(log.entries), (), absent_nodes, declaration=declaration)
    return decide(last, last.digest, view, 7)


def _follow(history: History, *links: CertifiedDecision, me: NodeKey, absent: Collection[bytes] = ()) -> None:
    followed = history.follow(DecisionMessage(links), {me.id.raw}, absent)
    assert followed is not None
    history.adopt(followed)


def _removed_by_a_and_b() -> History:
    """Return the history of a machine that removed X while C slept."""
    history = _history()
    _follow(history, _next(history, (A, B, X), (A, B, X)), me=A)
    _follow(history, _next(history, (A, B), (A, B)), me=A)
    entry = encode_entry(history.log.revoke(A, X.id))
    _follow(history, _next(history, (A, B), (A, B), (entry,)), me=A)
    assert history.role(X.id.raw) is None
    return history


def test_follow_chain_with_certificates_adopts_newest_decision_and_log() -> None:
    here, there = _history(), _removed_by_a_and_b()
    _follow(here, *there.chain[1:], me=C)
    assert here.record.digest == there.record.digest
    assert here.log == there.log
    assert here.role(X.id.raw) is None


def test_follow_links_after_a_gap_asks_for_more() -> None:
    there = _removed_by_a_and_b()
    assert _history().follow(DecisionMessage(there.chain[2:]), {C.id.raw}, ()) is None


def test_follow_branch_of_removed_owner_is_rejected_by_the_machine_that_slept() -> None:
    """X forges a branch with the old log and talks to C before the others do."""
    sleeper = _history()
    forged = _certified(_branch(FIRST, (X,), X, (A, B, C), LOG), (X,))
    with pytest.raises(TrustError, match="continue --without"):
        _follow(sleeper, forged, me=C)
    assert sleeper.decided == FIRST


def test_follow_branch_of_removed_owner_is_rejected_by_machines_that_know() -> None:
    """Even if C voted for the forged branch, A does not take X back."""
    history = _removed_by_a_and_b()
    before = history.record
    forged = _certified(_branch(FIRST, (X, C), X, (A, B), LOG), (X, C))
    with pytest.raises(TrustError, match="which was removed, opened that branch"):
        _follow(history, forged, me=A)
    assert history.record == before
    assert history.role(X.id.raw) is None


def test_follow_decision_signed_by_one_owner_is_rejected() -> None:
    history = _history()
    entry = encode_entry(LOG.admit(X, NodeKey.generate().id, "owner", "second"))
    with pytest.raises(TrustError, match="no quorum"):
        _follow(history, _next(history, (X,), (X,), (entry,)), me=C)


def test_follow_longer_log_without_decision_changes_nothing() -> None:
    """A log entry that an owner signed counts only once it is decided."""
    history = _history()
    entry = encode_entry(LOG.admit(X, NodeKey.generate().id, "owner", "second"))
    message = DecisionMessage((CertifiedDecision(FIRST),), len(LOG.entries), (entry,))
    assert history.follow(message, {C.id.raw}, ()) is None
    assert history.log == LOG


def test_follow_branch_of_another_person_keeps_removals_and_lists_them_again() -> None:
    """A's person continues without B and C, which removed X meanwhile: X stays out on that branch."""
    history = _history()
    _follow(history, _next(history, (B, C), (A, B, C)), me=B)
    _follow(history, _next(history, (B, C), (B, C), (encode_entry(history.log.revoke(B, X.id)),)), me=B)
    branch = _certified(_branch(FIRST, (A, X), A, (B, C), LOG), (A, X))
    _follow(history, branch, me=B)
    assert history.decided == branch.decision
    assert history.log.listed_role(X.id) == "owner"
    assert history.role(X.id.raw) is None
    assert history.log.readmitted == (X.id,)
    stored = StoredHistory(
        history.record, TrustLog.read(history.log.entries), history.chain, frozenset(history.removed)
    )
    assert History(stored).role(X.id.raw) is None, "a restart forgets the removal"


def test_follow_branch_with_entries_of_removed_owner_is_rejected() -> None:
    """On a branch that does not know the removal, X admits a second machine of its own."""
    history = _history()
    _follow(history, _next(history, (B, C), (A, B, C)), me=B)
    _follow(history, _next(history, (B, C), (B, C), (encode_entry(history.log.revoke(B, X.id)),)), me=B)
    branch = _branch(FIRST, (A, X), A, (B, C), LOG)
    entry = encode_entry(LOG.admit(X, NodeKey.generate().id, "owner", "second"))
    view = MembershipView(_members((A, X)), len(LOG.entries), (entry,))
    more = decide(branch, branch.digest, view)
    with pytest.raises(TrustError, match="is not an owner"):
        _follow(history, _certified(branch, (A, X)), _certified(more, (A, X)), me=B)


def test_follow_branch_after_the_word_of_the_own_person_is_accepted() -> None:
    branch = _certified(_branch(FIRST, (B, C), B, (A, X), LOG), (B,))
    with pytest.raises(TrustError, match="confirm it here"):
        _follow(_history(), branch, me=C)
    history = _history()
    _follow(history, branch, me=C, absent={A.id.raw, X.id.raw})
    assert history.decided == branch.decision


def test_follow_branch_that_drops_own_decisions_needs_a_quorum_of_each() -> None:
    """An old view in which two machines were a quorum must not be the way around a newer one."""
    pair = decide(None, bytes(32), MembershipView(_members((X, C)), len(LOG.entries), ()))
    history = _history(pair)
    _follow(history, _next(history, OWNERS, (X, C)), me=C)
    forged = _certified(_branch(pair, (X,), X, (C,), LOG), (X,))
    with pytest.raises(TrustError, match="confirm it here"):
        _follow(history, forged, me=C)


@pytest.mark.parametrize("change", ["unsigned", "other machines", "other signer", "no branch"])
def test_follow_branch_without_valid_declaration_is_rejected(change: str) -> None:
    decision = _branch(FIRST, (A, B), A, (C, X), LOG)
    view = msgspec.msgpack.decode(decision.payload, type=MembershipView)
    assert view.declaration is not None
    if change == "unsigned":
        view = msgspec.structs.replace(view, declaration=None)
    elif change == "other machines":
        view = msgspec.structs.replace(view, without=(C.id.raw,))
    elif change == "other signer":
        view = msgspec.structs.replace(
            view, declaration=BranchDeclaration(B.id.raw, view.declaration.signature)
        )
    decision = decide(FIRST, FIRST.digest, view, 7)
    if change == "no branch":
        decision = msgspec.structs.replace(decision, branch=FIRST.branch)
    with pytest.raises(TrustError, match=r"declar|opens a branch"):
        _follow(_history(), _certified(decision, (A, B, C, X)), me=C)


def test_first_decisions_of_a_paired_machine_extend_its_log() -> None:
    there = _removed_by_a_and_b()
    here = History(StoredHistory(founded(decide(None, bytes(32), MembershipView((), 0, ()))), LOG))
    here.record = founded(PaxosDecision(0, 0, bytes(32), (), here.decided.payload))
    followed = here.follow(there.catch_up_message((), len(LOG.entries)), {C.id.raw}, ())
    assert followed is not None
    here.adopt(followed)
    assert here.log == there.log
    assert NodeId(X.id.raw) in here.log.revoked


def test_fault_of_branch_that_another_machine_declares_names_the_command() -> None:
    history = _history()
    decision = _branch(FIRST, (B, C), B, (A, X), LOG)
    fault = history.fault(decision, C.id.raw, ())
    assert fault is not None
    assert "barnraise continue --without" in fault
    assert history.fault(decision, C.id.raw, {A.id.raw, X.id.raw}) is None
    assert history.fault(decision, B.id.raw, ()) is None
