"""Quorum rule: any two quorums share a voter."""

from __future__ import annotations

import itertools

from barnraise.membership.consensus.quorum import is_quorum, quorum_status

NODES = [bytes([number]) * 32 for number in range(5)]


def test_any_two_quorums_share_a_voter() -> None:
    for count in range(1, 6):
        voters = NODES[:count]
        groups = [set(group) for size in range(count + 1) for group in itertools.combinations(voters, size)]
        quorums = [group for group in groups if is_quorum(voters, group)]
        assert quorums
        assert all(first & second for first in quorums for second in quorums)


def test_quorum_of_two_voters_is_senior_alone() -> None:
    assert is_quorum(NODES[:2], [NODES[0]])
    assert not is_quorum(NODES[:2], [NODES[1]])
    assert is_quorum(NODES[:2], [NODES[1]], absent=[NODES[0]])
    assert not is_quorum([], [])


def test_quorum_status_names_voters_that_are_needed() -> None:
    a, b, c, d = NODES[:4]
    half = quorum_status((a, b, c, d), {a, b})
    assert not half.decides
    assert set(half.needed) == {a, b}
    assert quorum_status((a, b, c, d), {c}).decides
    assert quorum_status((a, b), {b}).decides
    assert quorum_status((a, b), {a}).needed == (a,)
