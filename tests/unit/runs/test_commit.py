"""What all members of a group conclude from the words with which it begins."""

from __future__ import annotations

from barnraise.runs.commit import MemberState, conclude


def test_members_go_ahead_only_if_all_can() -> None:
    """One on MPS cannot; if the others did, they would deal the next round by other speeds than it."""
    able, unable = MemberState(False, 3), MemberState(False, 3, overlaps=False)
    assert conclude([able, able]).overlaps
    assert not conclude([able, unable]).overlaps
