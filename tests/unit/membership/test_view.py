"""The next view: who stays keeps its place, who returns goes last, nothing changes without a reason."""

from __future__ import annotations

import pytest

from barnraise.core.errors import ProtocolError
from barnraise.membership.paxos import PaxosDecision
from barnraise.membership.view import (
    MembershipView,
    PresentMember,
    WantedChange,
    coordinator,
    decide,
    first,
    next_view,
    read_view,
    standing,
)

A, B, C = (PresentMember(bytes([number]) * 32, bytes([number]) * 16) for number in range(3))
VIEW = MembershipView((A, B, C), 1, ())


def _wanted(**changes: object) -> WantedChange:
    usual: dict[str, object] = {"dead": (), "leaving": (), "arrived": {}, "entries": (), "log_length": 1}
    return WantedChange(**{**usual, **changes})  # type: ignore[arg-type]


def test_nothing_new_changes_nothing() -> None:
    assert next_view(VIEW, _wanted(arrived={A.node: A, B.node: B})) is None


def test_the_dead_and_the_leaving_go() -> None:
    view = next_view(VIEW, _wanted(dead=(B.node,), leaving=(C.node,)))
    assert view is not None
    assert view.members == (A,)
    assert "died" in view.why
    assert "left" in view.why


def test_a_new_incarnation_goes_last_even_if_its_old_one_counts_as_dead() -> None:
    again = PresentMember(A.node, b"x" * 16)
    view = next_view(VIEW, _wanted(dead=(A.node,), arrived={A.node: again}))
    assert view is not None
    assert view.members == (B, C, again)


def test_a_view_without_voters_is_not_made() -> None:
    assert next_view(MembershipView((A,), 1, ()), _wanted(leaving=(A.node,))) is None


def test_the_most_senior_living_voter_coordinates() -> None:
    guest = PresentMember(A.node, A.incarnation, votes=False)
    assert coordinator(MembershipView((guest, B, C), 1, ()), ())[0] == B.node
    node, why = coordinator(VIEW, {A.node})
    assert node == B.node
    assert "do not answer" in why
    assert coordinator(VIEW, {A.node, B.node, C.node})[0] is None


def test_who_waits_knows_for_whom() -> None:
    four = MembershipView((*VIEW.members, PresentMember(b"\3" * 32, bytes(16))), 1, ())
    half = standing(four, {A.node, B.node})
    assert not half.decides
    assert set(half.needed) == {A.node, B.node}
    assert standing(four, {C.node}).decides
    assert standing(MembershipView((A, B), 1, ()), {B.node}).decides
    assert standing(MembershipView((A, B), 1, ()), {A.node}).needed == (A.node,)


def test_a_view_that_contradicts_itself_is_refused() -> None:
    good = first(A.node, A.incarnation, 1)
    assert read_view(good).members == (A,)
    with pytest.raises(ProtocolError, match="contradicts"):
        read_view(PaxosDecision(0, 1, bytes(32), (B.node,), good.payload))
    with pytest.raises(ProtocolError, match="contradicts"):
        read_view(decide(None, bytes(32), MembershipView((A, A), 1, ())))
    with pytest.raises(ProtocolError, match="cannot be read"):
        read_view(PaxosDecision(0, 1, bytes(32), (), b"\x91" * 2000))
