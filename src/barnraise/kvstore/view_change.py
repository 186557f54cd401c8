"""What a new primary may conclude from the copies that have answered it. Pure.

What was ever answered to a client is held by a quorum of the voters of its view. So a quorum of the voters
of the last view that served, and of each view after it, knows all of it: the newest copy among them has
everything. A copy that has been started anew may have forgotten, and does not count for the views before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from barnraise.kvstore.messages import NOBODY, IsQuorum, ReplicaView, ViewBallot, ViewPromise


class UseOwnLog(NamedTuple):
    """The copy of this node is the newest, and complete."""

    node: bytes


class StartEmpty(NamedTuple):
    """Begin an empty board: there never was one (``lost`` is empty), or it is lost, for this reason."""

    lost: str


class WaitFor(NamedTuple):
    """For any of these to answer."""

    missing: tuple[bytes, ...]
    view: int


Verdict = UseOwnLog | StartEmpty | WaitFor


def judge(
    view: ReplicaView,
    replies: Mapping[bytes, ViewPromise],
    known: Mapping[int, ReplicaView],
    is_quorum: IsQuorum,
    *,
    impatient: bool,
) -> Verdict:
    """``replies`` has the primary's own. ``impatient``: those who left have had their time to answer."""
    if view.forced:
        missing = tuple(node for node in view.members if node not in replies)
        if missing and not impatient:
            return WaitFor(missing, view.number)
        return _newest(replies)
    top = max(reply.held.view for reply in replies.values())
    began = view.number if top >= view.number else view.number - 1
    for number in range(began, max(top, 1) - 1, -1):
        past = known.get(number)
        if past is None:
            if impatient:
                return StartEmpty(f"nobody here knows who was in view {number}")
            return WaitFor(tuple(node for node in view.members if node not in replies), number)
        verdict = _of_view(view, past, replies, is_quorum, impatient=impatient)
        if verdict is not None:
            return verdict
        if past.forced:
            break
    return _newest(replies)


def _of_view(
    view: ReplicaView,
    past: ReplicaView,
    replies: Mapping[bytes, ViewPromise],
    is_quorum: IsQuorum,
    *,
    impatient: bool,
) -> WaitFor | StartEmpty | None:
    """None if enough of its voters have answered and remember it."""
    remember = {node for node in past.voters if node in replies and replies[node].blind < past.number}
    if is_quorum(past, remember):
        return None
    may_answer = {
        node for node in past.voters if node not in replies and (node in view.members or not impatient)
    }
    if is_quorum(past, remember | may_answer):
        return WaitFor(tuple(sorted(may_answer)), past.number)
    return StartEmpty(f"too few of the {len(past.voters)} voters of view {past.number} still have it")


def _newest(replies: Mapping[bytes, ViewPromise]) -> UseOwnLog | StartEmpty:
    node, best = max(replies.items(), key=lambda item: (item[1].held.rank, item[1].number, item[0]))
    return StartEmpty("") if best.held == NOBODY else UseOwnLog(node)


def founding_name(ballot: ViewBallot) -> bytes:
    """Another one for every board that was ever begun."""
    seed = ballot.nonce + ballot.view.to_bytes(8, "big") + ballot.attempt.to_bytes(8, "big")
    return hashlib.blake2b(seed, digest_size=8).digest()


class ViewChange:
    """What a primary has been told so far under this ballot."""

    __slots__ = ("asked", "ballot", "began", "replies", "waits_for", "wanted")

    def __init__(self, ballot: ViewBallot, began: float) -> None:
        self.ballot = ballot
        self.began = began
        self.asked = began
        self.replies: dict[bytes, ViewPromise] = {}
        self.wanted: ViewPromise | None = None
        self.waits_for: tuple[bytes, ...] = ()

    def unheard(self, view: ReplicaView, known: Mapping[int, ReplicaView]) -> list[bytes]:
        """Who may hold something and has not said so: members, and voters of the views before."""
        top = max(reply.held.view for reply in self.replies.values())
        nodes = dict.fromkeys(view.members)
        for number, past in known.items():
            if number >= top:
                nodes |= dict.fromkeys(sorted(past.voters))
        return [node for node in nodes if node not in self.replies]
