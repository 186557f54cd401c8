"""Next view: members that stay keep their seniority, members that return go last."""

from __future__ import annotations

import pytest

from barnraise.core.errors import ProtocolError
from barnraise.membership.consensus.paxos import PaxosDecision
from barnraise.membership.view import (
    MembershipView,
    PresentMember,
    WantedChange,
    decide,
    first,
    next_view,
    read_view,
)

A, B, C = (PresentMember(bytes([number]) * 32, bytes([number]) * 16) for number in range(3))
VIEW = MembershipView((A, B, C), 1, ())


def _wanted(**changes: object) -> WantedChange:
    usual: dict[str, object] = {"dead": (), "leaving": (), "arrived": {}, "entries": (), "log_length": 1}
    return WantedChange(**{**usual, **changes})  # type: ignore[arg-type]


def test_next_view_without_changes_is_none() -> None:
    assert next_view(VIEW, _wanted(arrived={A.node: A, B.node: B})) is None


def test_next_view_drops_dead_and_leaving_members() -> None:
    view = next_view(VIEW, _wanted(dead=(B.node,), leaving=(C.node,)))
    assert view is not None
    assert view.members == (A,)
    assert "died" in view.why
    assert "left" in view.why


def test_next_view_puts_new_incarnation_of_dead_member_last() -> None:
    again = PresentMember(A.node, b"x" * 16)
    view = next_view(VIEW, _wanted(dead=(A.node,), arrived={A.node: again}))
    assert view is not None
    assert view.members == (B, C, again)


def test_next_view_without_voters_is_none() -> None:
    assert next_view(MembershipView((A,), 1, ()), _wanted(leaving=(A.node,))) is None


def test_read_view_that_contradicts_itself_raises() -> None:
    good = first(A.node, A.incarnation, 1)
    assert read_view(good).members == (A,)
    with pytest.raises(ProtocolError, match="contradicts"):
        read_view(PaxosDecision(0, 1, bytes(32), (B.node,), good.payload))
    with pytest.raises(ProtocolError, match="contradicts"):
        read_view(decide(None, bytes(32), MembershipView((A, A), 1, ())))
    with pytest.raises(ProtocolError, match="cannot be read"):
        read_view(PaxosDecision(0, 1, bytes(32), (), b"\x91" * 2000))
