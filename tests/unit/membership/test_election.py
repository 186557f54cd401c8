"""Election of the coordinator by seniority."""

from __future__ import annotations

from barnraise.membership.election import elect_coordinator
from barnraise.membership.view import MembershipView, PresentMember

A, B, C = (PresentMember(bytes([number]) * 32, bytes([number]) * 16) for number in range(3))
VIEW = MembershipView((A, B, C), 1, ())


def test_elect_coordinator_returns_most_senior_living_voter() -> None:
    guest = PresentMember(A.node, A.incarnation, votes=False)
    assert elect_coordinator(MembershipView((guest, B, C), 1, ()), ())[0] == B.node
    node, why = elect_coordinator(VIEW, {A.node})
    assert node == B.node
    assert "do not answer" in why
    assert elect_coordinator(VIEW, {A.node, B.node, C.node})[0] is None
