"""Election of the coordinator: a pure function of the view and the dead members, without messages."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from barnraise.membership.view import MembershipView


class ElectedCoordinator(NamedTuple):
    """Node that proposes the next view, and why. ``node`` is None if every voter is dead."""

    node: bytes | None
    why: str


def elect_coordinator(view: MembershipView, dead: Collection[bytes]) -> ElectedCoordinator:
    """Return the most senior voter that is not known to be dead.

    Members may disagree for a while about which members are dead. That is safe: a coordinator only proposes,
    and consensus decides.
    """
    skipped = 0
    for member in view.members:
        if member.votes and member.node not in dead:
            if skipped:
                return ElectedCoordinator(member.node, f"{skipped} that joined earlier do not answer")
            return ElectedCoordinator(member.node, "the longest in the cluster")
        skipped += member.votes
    return ElectedCoordinator(None, "no voter answers")
