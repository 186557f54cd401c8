"""Quorum rule: which sets of voters may decide, and which voters are missing for a decision. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec


def is_quorum(voters: Collection[bytes], agreeing: Collection[bytes], absent: Collection[bytes] = ()) -> bool:
    """Return True for a majority, or for exactly half with the most senior voter.

    Any two quorums share a voter. ``voters``: most senior first. ``absent``: voters that the user has
    declared gone; they do not count.
    """
    counted = [node for node in voters if node not in absent]
    if not counted:
        return False
    yes = sum(node in agreeing for node in counted)
    return 2 * yes > len(counted) or (2 * yes == len(counted) and counted[0] in agreeing)


class QuorumStatus(msgspec.Struct, frozen=True):
    """Ability of the reachable voters to decide.

    ``missing``: unreachable voters. ``needed``: those of them of which one more would make a quorum, or all.
    """

    decides: bool
    missing: tuple[bytes, ...]
    needed: tuple[bytes, ...]


def quorum_status(voters: Sequence[bytes], dead: Collection[bytes]) -> QuorumStatus:
    """Return whether the voters that are not dead form a quorum, and if not, which ones they need."""
    live = [node for node in voters if node not in dead]
    missing = tuple(node for node in voters if node in dead)
    if is_quorum(voters, live):
        return QuorumStatus(True, missing, ())
    enough = tuple(node for node in missing if is_quorum(voters, [*live, node]))
    return QuorumStatus(False, missing, enough or missing)
