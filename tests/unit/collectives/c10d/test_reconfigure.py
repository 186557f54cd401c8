"""Handles of a reconfiguration, the ranks that they give, and what is refused."""

from __future__ import annotations

import pytest

from barnraise.collectives.c10d.operations import OpenedGroup
from barnraise.collectives.c10d.reconfigure import (
    Reconfiguration,
    ReconfigureHandle,
    decode_handle,
    encode_handle,
    group_name,
    ranked_handles,
)
from barnraise.collectives.messages import GroupMember
from barnraise.core.errors import CollectiveError, ProtocolError


def _handle(letter: str, nonce: bytes = bytes(16)) -> ReconfigureHandle:
    return ReconfigureHandle(GroupMember(letter.encode() * 16, 4000, ("127.0.0.1",)), nonce)


A, B, C = _handle("a"), _handle("b"), _handle("c")
TOO_SHORT = ReconfigureHandle(GroupMember(b"short", 4000, ()), bytes(16))


def test_text_of_a_handle_gives_the_handle() -> None:
    assert decode_handle(encode_handle(A)) == A


@pytest.mark.parametrize(
    "text",
    ["", "?", "AAAA", "x" * 100_000, "ü", encode_handle(TOO_SHORT), encode_handle(_handle("a", b"1"))],
)
def test_text_that_is_no_handle_is_rejected(text: str) -> None:
    with pytest.raises(ProtocolError, match="handle"):
        decode_handle(text)


def test_list_of_handles_gives_ranks_by_position() -> None:
    assert ranked_handles([encode_handle(B), encode_handle(A)]) == (B, A)


def test_set_of_handles_gives_the_same_ranks_everywhere() -> None:
    assert ranked_handles({encode_handle(handle) for handle in (C, A, B)}) == (A, B, C)


def test_two_handles_of_one_worker_are_rejected() -> None:
    with pytest.raises(ProtocolError, match="one worker"):
        ranked_handles([encode_handle(A), encode_handle(_handle("a", b"1" * 16))])


def test_group_name_depends_on_uuid_members_and_group_objects() -> None:
    other = _handle("b", b"1" * 16)
    groups = [(1, (A, B)), (2, (A, B)), (1, (B, A)), (1, (A,)), (1, (A, other))]
    assert len({group_name(uuid, handles) for uuid, handles in groups}) == len(groups)


class _Opener:
    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[GroupMember, ...], float]] = []

    def open(self, rank: int, members: tuple[GroupMember, ...], name: str, timeout_s: float) -> OpenedGroup:
        self.calls.append((rank, members, timeout_s))
        return OpenedGroup(rank, len(members), None)  # type: ignore[arg-type]  # nothing is submitted here


def test_reconfiguration_opens_the_group_with_the_own_rank() -> None:
    opener = _Opener()
    reconfiguration = Reconfiguration(B.member, opener.open)
    opened = reconfiguration.open(7, [encode_handle(A), reconfiguration.handle()], 3.0)
    assert (opened.rank, opened.world) == (1, 2)
    assert opener.calls == [(1, (A.member, B.member), 3.0)]


def test_uuid_that_was_used_is_rejected() -> None:
    reconfiguration = Reconfiguration(A.member, _Opener().open)
    reconfiguration.open(7, [reconfiguration.handle()], 1.0)
    with pytest.raises(RuntimeError, match="already used"):
        reconfiguration.open(7, [reconfiguration.handle()], 1.0)


def test_rank_that_is_not_among_the_handles_is_rejected_and_uses_no_uuid() -> None:
    reconfiguration = Reconfiguration(A.member, _Opener().open)
    with pytest.raises(CollectiveError, match="not among"):
        reconfiguration.open(7, [encode_handle(B)], 1.0)
    assert reconfiguration.open(7, [reconfiguration.handle()], 1.0).world == 1
