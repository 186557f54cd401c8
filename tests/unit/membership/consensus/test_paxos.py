"""Single-decree Paxos: promises hold and votes are not forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.membership.consensus.paxos import (
    AcceptorState,
    PaxosAccept,
    PaxosAccepted,
    PaxosBallot,
    PaxosDecision,
    PaxosPrepare,
    PaxosPromise,
    PaxosProposal,
    PaxosReject,
    Vote,
    answer_accept,
    answer_prepare,
    founded,
)

NODES = [bytes([number]) * 32 for number in range(5)]


def _decision(last: AcceptorState, payload: bytes, *, branch: int = 0) -> PaxosDecision:
    return PaxosDecision(
        branch=branch,
        number=last.decided.number + 1,
        previous=last.digest,
        voters=last.decided.voters,
        payload=payload,
    )


def _sign(digest: bytes, ballot: PaxosBallot) -> bytes:
    return bytes(64)


def _start(count: int) -> AcceptorState:
    return founded(
        PaxosDecision(branch=0, number=1, previous=bytes(32), voters=tuple(NODES[:count]), payload=b"")
    )


def test_acceptor_after_promise_rejects_lower_ballot() -> None:
    record = _start(3)
    high, low = PaxosBallot(5, NODES[1]), PaxosBallot(4, NODES[0])
    answer = answer_prepare(record, NODES[2], PaxosPrepare(record.digest, high))
    assert isinstance(answer.reply, PaxosPromise)
    assert answer.record is not None
    record = answer.record
    assert isinstance(answer_prepare(record, NODES[2], PaxosPrepare(record.digest, low)).reply, PaxosReject)
    vote = answer_accept(record, NODES[2], PaxosAccept(low, _decision(record, b"x")), _sign)
    assert isinstance(vote.reply, PaxosReject)
    assert vote.record is None


def test_proposal_adopts_earlier_vote_of_promise() -> None:
    record = _start(3)
    wanted = _decision(record, b"first")
    answer = answer_accept(record, NODES[2], PaxosAccept(PaxosBallot(1, NODES[0]), wanted), _sign)
    assert isinstance(answer.reply, PaxosAccepted)
    assert answer.record is not None
    promise = answer_prepare(
        answer.record, NODES[2], PaxosPrepare(record.digest, PaxosBallot(2, NODES[1]))
    ).reply
    assert isinstance(promise, PaxosPromise)
    proposal = PaxosProposal(record, PaxosBallot(2, NODES[1]), _decision(record, b"second"), frozenset())
    assert proposal.promised(NODES[1], PaxosPromise(record.digest, proposal.ballot, None)) is None
    accept = proposal.promised(NODES[2], promise)
    assert accept is not None
    assert accept.decision == wanted


@pytest.mark.parametrize("order", [(1, 3), (3, 1)])
def test_proposal_adopts_vote_of_highest_ballot(order: tuple[int, int]) -> None:
    """The vote of the highest ballot may be decided already; an older one is not."""
    record = _start(5)
    proposal = PaxosProposal(record, PaxosBallot(9, NODES[0]), _decision(record, b"own"), frozenset())
    assert proposal.promised(NODES[0], PaxosPromise(record.digest, proposal.ballot, None)) is None
    accept = None
    for sender, number in zip(NODES[1:3], order, strict=True):
        vote = Vote(PaxosBallot(number, NODES[4]), _decision(record, bytes([number])))
        accept = proposal.promised(sender, PaxosPromise(record.digest, proposal.ballot, vote))
    assert accept is not None
    assert accept.decision.payload == bytes([3])


def test_acceptor_ignores_questions_of_other_positions_and_non_voters() -> None:
    record = _start(3)
    ballot = PaxosBallot(1, NODES[0])
    assert answer_prepare(record, NODES[4], PaxosPrepare(record.digest, ballot)).reply is None
    assert answer_prepare(record, NODES[1], PaxosPrepare(bytes(32), ballot)).reply is None
    assert (
        answer_prepare(record, NODES[1], PaxosPrepare(record.digest, PaxosBallot(1, NODES[4]))).reply is None
    )
    far = _decision(record, b"x")
    skipped = PaxosDecision(far.branch, far.number + 1, far.previous, far.voters, far.payload)
    assert answer_accept(record, NODES[1], PaxosAccept(ballot, skipped), _sign).reply is None


def test_proposal_of_new_branch_ignores_votes_of_old_branch() -> None:
    record = _start(2)
    old = answer_accept(
        record, NODES[1], PaxosAccept(PaxosBallot(1, NODES[0]), _decision(record, b"old")), _sign
    ).record
    assert old is not None
    absent = frozenset({NODES[0]})
    proposal = PaxosProposal(record, PaxosBallot(2, NODES[1]), _decision(record, b"new", branch=1), absent)
    promise = answer_prepare(old, NODES[1], proposal.prepare()).reply
    assert isinstance(promise, PaxosPromise)
    accept = proposal.promised(NODES[1], promise)
    assert accept is not None
    assert accept.decision.payload == b"new"


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), st.integers(0, 4)), max_size=60),
)
def test_paxos_in_any_interleaving_chooses_one_value(count: int, steps: list[tuple[int, int, int]]) -> None:
    """Messages of proposers and acceptors may be lost; at most one value is chosen."""
    start = _start(count)
    records = dict.fromkeys(NODES[:count], start)
    proposals: dict[int, PaxosProposal] = {}
    rounds = 0
    chosen: set[bytes] = set()
    for proposer_index, action, acceptor_index in steps:
        number = proposer_index % count
        proposer, acceptor = NODES[number], NODES[acceptor_index % count]
        if action == 0 or number not in proposals:
            rounds += 1
            ballot = PaxosBallot(rounds, proposer)
            proposals[number] = PaxosProposal(start, ballot, _decision(start, bytes([rounds])), frozenset())
        proposal = proposals[number]
        request = (
            PaxosAccept(proposal.ballot, proposal.decision) if proposal.accepting else proposal.prepare()
        )
        if isinstance(request, PaxosAccept):
            answer = answer_accept(records[acceptor], acceptor, request, _sign)
        else:
            answer = answer_prepare(records[acceptor], acceptor, request)
        if answer.record is not None:
            records[acceptor] = answer.record
        if isinstance(answer.reply, PaxosPromise):
            proposal.promised(acceptor, answer.reply)
        elif isinstance(answer.reply, PaxosAccepted) and proposal.accepted(acceptor, answer.reply):
            chosen.add(proposal.decision.payload)
    assert len(chosen) <= 1
