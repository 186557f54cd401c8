"""One decision at a time: quorums meet, promises hold, votes are not forgotten."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from barnraise.membership.paxos import (
    Accept,
    Accepted,
    Ballot,
    Decision,
    Prepare,
    Promise,
    Proposal,
    Record,
    Refuse,
    answer_accept,
    answer_prepare,
    founded,
    is_quorum,
)

NODES = [bytes([number]) * 32 for number in range(5)]


def _decision(last: Record, payload: bytes, *, branch: int = 0) -> Decision:
    return Decision(
        branch=branch,
        number=last.decided.number + 1,
        previous=last.digest,
        voters=last.decided.voters,
        payload=payload,
    )


def _start(count: int) -> Record:
    return founded(Decision(branch=0, number=1, previous=bytes(32), voters=tuple(NODES[:count]), payload=b""))


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
    high, low = Ballot(5, NODES[1]), Ballot(4, NODES[0])
    answer = answer_prepare(record, NODES[2], Prepare(record.digest, high))
    assert isinstance(answer.reply, Promise)
    assert answer.record is not None
    record = answer.record
    assert isinstance(answer_prepare(record, NODES[2], Prepare(record.digest, low)).reply, Refuse)
    vote = answer_accept(record, NODES[2], Accept(low, _decision(record, b"x")))
    assert isinstance(vote.reply, Refuse)
    assert vote.record is None


def test_a_vote_is_told_to_the_next_proposer() -> None:
    record = _start(3)
    wanted = _decision(record, b"first")
    answer = answer_accept(record, NODES[2], Accept(Ballot(1, NODES[0]), wanted))
    assert isinstance(answer.reply, Accepted)
    assert answer.record is not None
    promise = answer_prepare(answer.record, NODES[2], Prepare(record.digest, Ballot(2, NODES[1]))).reply
    assert isinstance(promise, Promise)
    proposal = Proposal(record, Ballot(2, NODES[1]), _decision(record, b"second"), frozenset())
    assert proposal.promised(NODES[1], Promise(record.digest, proposal.ballot, None)) is None
    accept = proposal.promised(NODES[2], promise)
    assert accept is not None
    assert accept.decision == wanted


def test_what_is_not_next_or_not_a_voters_gets_no_answer() -> None:
    record = _start(3)
    ballot = Ballot(1, NODES[0])
    assert answer_prepare(record, NODES[4], Prepare(record.digest, ballot)).reply is None
    assert answer_prepare(record, NODES[1], Prepare(bytes(32), ballot)).reply is None
    assert answer_prepare(record, NODES[1], Prepare(record.digest, Ballot(1, NODES[4]))).reply is None
    far = _decision(record, b"x")
    skipped = Decision(far.branch, far.number + 1, far.previous, far.voters, far.payload)
    assert answer_accept(record, NODES[1], Accept(ballot, skipped)).reply is None


def test_the_users_word_is_not_bound_by_the_old_branch() -> None:
    record = _start(2)
    old = answer_accept(record, NODES[1], Accept(Ballot(1, NODES[0]), _decision(record, b"old"))).record
    assert old is not None
    absent = frozenset({NODES[0]})
    proposal = Proposal(record, Ballot(2, NODES[1]), _decision(record, b"new", branch=1), absent)
    promise = answer_prepare(old, NODES[1], proposal.prepare()).reply
    assert isinstance(promise, Promise)
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
    proposals: dict[int, Proposal] = {}
    rounds = 0
    chosen: set[bytes] = set()
    for who, what, whom in steps:
        proposer, acceptor = NODES[who % count], NODES[whom % count]
        if what == 0 or who % count not in proposals:
            rounds += 1
            ballot = Ballot(rounds, proposer)
            proposals[who % count] = Proposal(start, ballot, _decision(start, bytes([rounds])), frozenset())
        proposal = proposals[who % count]
        asked = Accept(proposal.ballot, proposal.decision) if proposal.accepting else proposal.prepare()
        if isinstance(asked, Accept):
            answer = answer_accept(records[acceptor], acceptor, asked)
        else:
            answer = answer_prepare(records[acceptor], acceptor, asked)
        if answer.record is not None:
            records[acceptor] = answer.record
        if isinstance(answer.reply, Promise):
            proposal.promised(acceptor, answer.reply)
        elif isinstance(answer.reply, Accepted) and proposal.accepted(acceptor, answer.reply):
            chosen.add(proposal.decision.payload)
    assert len(chosen) <= 1
