"""Pairs of ranks, which fail one by one. Ranks are threads here."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from barnraise.collectives.c10d.create import arena_of_thread, close_pairs, open_pairs
from barnraise.collectives.ops import operation
from barnraise.collectives.rendezvous import encode_entry
from barnraise.core.errors import OperationTimeout, PeerLost
from barnraise.testing import spawn


def _gather(message: bytes) -> list[bytes]:
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    return messages


def test_each_rank_has_a_group_of_two_with_each_other_rank() -> None:
    def body(rank: int) -> dict[int, tuple[int, int]]:
        pairs = open_pairs(rank, 3, _gather, 10.0)
        for pair in pairs.values():
            pair.submitter.submit_collective(operation.barrier(), 10.0).wait()
        close_pairs(pairs.values())
        return {other: (pair.rank, pair.world) for other, pair in pairs.items()}

    results = spawn(body, world=3, timeout_s=20)
    assert results == {
        rank: {other: (int(rank > other), 2) for other in range(3) if other != rank} for rank in range(3)
    }


def test_rank_that_opens_no_pair_is_named_as_all_ranks_call_it() -> None:
    def body(rank: int) -> tuple[int, ...]:
        if rank == 2:
            arena = arena_of_thread.get()
            assert arena is not None
            _gather(encode_entry(arena.comm_process.member))
            time.sleep(1.5)
            return ()
        try:
            open_pairs(rank, 3, _gather, 0.5)
        except OperationTimeout as error:
            return error.late
        return ()

    assert spawn(body, world=3, timeout_s=20) == {0: (2,), 1: (2,), 2: ()}


def test_lost_rank_ends_its_own_pairs_only() -> None:
    def body(rank: int) -> str:
        pairs = open_pairs(rank, 3, _gather, 10.0)
        if rank == 2:
            close_pairs(pairs.values())
            return "left"
        try:
            pairs[2].submitter.submit_collective(operation.barrier(), 10.0).wait()
        except PeerLost:
            pairs[1 - rank].submitter.submit_collective(operation.barrier(), 10.0).wait()
            return "the other pair works"
        return "nothing was lost"

    expected = "the other pair works"
    assert spawn(body, world=3, timeout_s=20) == {0: expected, 1: expected, 2: "left"}
