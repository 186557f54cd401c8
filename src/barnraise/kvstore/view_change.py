"""Log choice of a view change: the log that a new primary of the store starts from. Pure.

Every operation that was answered to a client is held by a quorum of the voters of its view. A new primary
hears a quorum of the last view that served, and of each view after it. The newest log among the replies is
therefore complete. A restarted replica may have lost its state, so it does not count for earlier views.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from barnraise.kvstore.messages import NO_BALLOT, IsQuorum, ReplicaView, ViewBallot, ViewPromise


class UseOwnLog(NamedTuple):
    """Start from the log of this node, which is the newest and complete."""

    node: bytes


class StartEmpty(NamedTuple):
    """Start with an empty store.

    ``lost``: the reason why earlier contents are lost; empty if there were none.
    """

    lost: str


class WaitFor(NamedTuple):
    """Wait until one of these nodes replies."""

    missing: tuple[bytes, ...]
    view: int


LogChoice = UseOwnLog | StartEmpty | WaitFor


def choose_log(
    view: ReplicaView,
    replies: Mapping[bytes, ViewPromise],
    known: Mapping[int, ReplicaView],
    is_quorum: IsQuorum,
    *,
    is_overdue: bool,
) -> LogChoice:
    """Return the log that the new primary starts from.

    ``replies`` includes the primary's own. ``is_overdue``: former members have had their time to reply.
    """
    if view.forced:
        missing = tuple(node for node in view.members if node not in replies)
        if missing and not is_overdue:
            return WaitFor(missing, view.number)
        return _newest_log(replies)
    last_active = max(reply.log_ballot.view for reply in replies.values())
    newest = view.number if last_active >= view.number else view.number - 1
    for number in range(newest, max(last_active, 1) - 1, -1):
        past = known.get(number)
        if past is None:
            if is_overdue:
                return StartEmpty(f"no machine here knows which machines held change {number}")
            return WaitFor(tuple(node for node in view.members if node not in replies), number)
        choice = _check_view(view, past, replies, is_quorum, is_overdue=is_overdue)
        if choice is not None:
            return choice
        if past.forced:
            break
    return _newest_log(replies)


def choose_durable_log(
    view: ReplicaView,
    replies: Mapping[bytes, ViewPromise],
    known: Mapping[int, ReplicaView],
    is_quorum: IsQuorum,
    is_gone: Callable[[bytes], bool],
    *,
    is_overdue: bool,
) -> tuple[LogChoice, str]:
    """Return the log that the new primary of a durable store starts from, and why entries may be missing.

    It differs from `choose_log` in two points, because disks return. The primary waits for voters of earlier
    views without a limit, unless they were removed from the cluster (``is_gone``). And it never starts empty
    while a member has a log.
    """
    absent = tuple(node for node in view.members if node not in replies)
    if view.forced:
        if absent and not is_overdue:
            return WaitFor(absent, view.number), ""
        return _newest_log(replies), ""
    last_active = max(reply.log_ballot.view for reply in replies.values())
    newest = view.number if last_active >= view.number else view.number - 1
    oldest = max(last_active, 1)
    lost = ""
    expected = newest
    for number in sorted((number for number in known if oldest <= number <= newest), reverse=True):
        past = known[number]
        if number != expected and not is_overdue:
            return WaitFor(absent, expected), ""
        remember = {
            node for node in past.voters if node in replies and replies[node].forgotten_until < past.number
        }
        if not is_quorum(past, remember):
            others = {node for node in past.voters if node not in replies and not is_gone(node)}
            if others and (is_quorum(past, remember | others) or not is_overdue):
                return WaitFor(tuple(sorted(others)), number), ""
            lost = f"too few of the {len(past.voters)} machines that voted on it still have it"
        if past.forced:
            return _newest_log(replies), lost
        expected = number - 1
    if expected >= oldest and not is_overdue:
        return WaitFor(absent, expected), ""
    return _newest_log(replies), lost


def _check_view(
    view: ReplicaView,
    past: ReplicaView,
    replies: Mapping[bytes, ViewPromise],
    is_quorum: IsQuorum,
    *,
    is_overdue: bool,
) -> WaitFor | StartEmpty | None:
    """Return None if enough voters of a past view have replied and still have its state."""
    remember = {
        node for node in past.voters if node in replies and replies[node].forgotten_until < past.number
    }
    if is_quorum(past, remember):
        return None
    may_answer = {
        node for node in past.voters if node not in replies and (node in view.members or not is_overdue)
    }
    if is_quorum(past, remember | may_answer):
        return WaitFor(tuple(sorted(may_answer)), past.number)
    return StartEmpty(f"too few of the {len(past.voters)} machines that voted on it still have it")


def _newest_log(replies: Mapping[bytes, ViewPromise]) -> UseOwnLog | StartEmpty:
    """Return the newest log among the replies."""
    node, best = max(replies.items(), key=lambda item: (item[1].log_ballot.rank, item[1].op_number, item[0]))
    return StartEmpty("") if best.log_ballot == NO_BALLOT else UseOwnLog(node)


def founding_id(ballot: ViewBallot) -> bytes:
    """Return the id of the history that starts empty under this ballot."""
    seed = ballot.nonce + ballot.view.to_bytes(8, "big") + ballot.attempt.to_bytes(8, "big")
    return hashlib.blake2b(seed, digest_size=8).digest()


class ViewChange:
    """Replies that a new primary has received under its ballot."""

    __slots__ = ("asked_at", "ballot", "replies", "started_at", "waiting_for", "wanted")

    def __init__(self, ballot: ViewBallot, started_at: float) -> None:
        self.ballot = ballot
        self.started_at = started_at
        self.asked_at = started_at
        self.replies: dict[bytes, ViewPromise] = {}
        self.wanted: ViewPromise | None = None
        self.waiting_for: tuple[bytes, ...] = ()

    def nodes_to_ask(self, view: ReplicaView, known: Mapping[int, ReplicaView]) -> list[bytes]:
        """Return the nodes that may hold state and have not replied: members, and voters of earlier views."""
        last_active = max(reply.log_ballot.view for reply in self.replies.values())
        nodes = dict.fromkeys(view.members)
        for number, past in known.items():
            if number >= last_active:
                nodes |= dict.fromkeys(sorted(past.voters))
        return [node for node in nodes if node not in self.replies]
