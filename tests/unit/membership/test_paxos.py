"""One decision at a time: quorums meet, promises hold, votes are not forgotten."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from barnraise.membership.paxos import (
    AcceptorState,
    PaxosAccept,
    PaxosAccepted,
    PaxosBallot,
    PaxosDecision,
    PaxosPrepare,
    PaxosPromise,
    PaxosProposal,
    PaxosReject,
    answer_accept,
    answer_prepare,
    founded,
    is_quorum,
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


def _start(count: int) -> AcceptorState:
    return founded(
        PaxosDecision(branch=0, number=1, previous=bytes(32), voters=tuple(NODES[:count]), payload=b"")
    )


def test_any_two_quorums_meet() -> None:
    for count in range(1, 6):
        voters = NODES[:count]
        groups = [set(group) for size in range(count + 1) for group in itertools.combinations(voters, size)]
        quorums = [group for group in groups if is_quorum(voters, group)]
        assert quorums
        assert all(one & other for one in quorums for other in quorums)


def test_two_machines_have_a_quorum_with_the_senior_alone() -> None:
    assert is_quorum(NODES[:2], [NODES[0]])
    assert not is_quorum(NODES[:2], [NODES[1]])
    assert is_quorum(NODES[:2], [NODES[1]], absent=[NODES[0]])
    assert not is_quorum([], [])


def test_a_promise_is_kept() -> None:
    record = _start(3)
    high, low = PaxosBallot(5, NODES[1]), PaxosBallot(4, NODES[0])
    answer = answer_prepare(record, NODES[2], PaxosPrepare(record.digest, high))
    assert isinstance(answer.reply, PaxosPromise)
    assert answer.record is not None
    record = answer.record
    assert isinstance(answer_prepare(record, NODES[2], PaxosPrepare(record.digest, low)).reply, PaxosReject)
    vote = answer_accept(record, NODES[2], PaxosAccept(low, _decision(record, b"x")))
    assert isinstance(vote.reply, PaxosReject)
    assert vote.record is None


def test_a_vote_is_told_to_the_next_proposer() -> None:
    record = _start(3)
    wanted = _decision(record, b"first")
    answer = answer_accept(record, NODES[2], PaxosAccept(PaxosBallot(1, NODES[0]), wanted))
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


def test_what_is_not_next_or_not_a_voters_gets_no_answer() -> None:
    record = _start(3)
    ballot = PaxosBallot(1, NODES[0])
    assert answer_prepare(record, NODES[4], PaxosPrepare(record.digest, ballot)).reply is None
    assert answer_prepare(record, NODES[1], PaxosPrepare(bytes(32), ballot)).reply is None
    assert (
        answer_prepare(record, NODES[1], PaxosPrepare(record.digest, PaxosBallot(1, NODES[4]))).reply is None
    )
    far = _decision(record, b"x")
    skipped = PaxosDecision(far.branch, far.number + 1, far.previous, far.voters, far.payload)
    assert answer_accept(record, NODES[1], PaxosAccept(ballot, skipped)).reply is None


def test_the_users_word_is_not_bound_by_the_old_branch() -> None:
    record = _start(2)
    old = answer_accept(
        record, NODES[1], PaxosAccept(PaxosBallot(1, NODES[0]), _decision(record, b"old"))
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
def test_nothing_else_is_ever_chosen(count: int, steps: list[tuple[int, int, int]]) -> None:
    """Proposers and acceptors in any interleaving, messages lost as they like: one value at most."""
    start = _start(count)
    records = dict.fromkeys(NODES[:count], start)
    proposals: dict[int, PaxosProposal] = {}
    rounds = 0
    chosen: set[bytes] = set()
    for who, what, whom in steps:
        proposer, acceptor = NODES[who % count], NODES[whom % count]
        if what == 0 or who % count not in proposals:
            rounds += 1
            ballot = PaxosBallot(rounds, proposer)
            proposals[who % count] = PaxosProposal(
                start, ballot, _decision(start, bytes([rounds])), frozenset()
            )
        proposal = proposals[who % count]
        asked = PaxosAccept(proposal.ballot, proposal.decision) if proposal.accepting else proposal.prepare()
        if isinstance(asked, PaxosAccept):
            answer = answer_accept(records[acceptor], acceptor, asked)
        else:
            answer = answer_prepare(records[acceptor], acceptor, asked)
        if answer.record is not None:
            records[acceptor] = answer.record
        if isinstance(answer.reply, PaxosPromise):
            proposal.promised(acceptor, answer.reply)
        elif isinstance(answer.reply, PaxosAccepted) and proposal.accepted(acceptor, answer.reply):
            chosen.add(proposal.decision.payload)
    assert len(chosen) <= 1
