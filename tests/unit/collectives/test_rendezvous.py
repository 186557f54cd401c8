"""Rendezvous through a store: complete, or an error that names missing and invalid ranks."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch.distributed as dist

from barnraise.collectives import rendezvous
from barnraise.collectives.messages import GroupMember
from barnraise.collectives.rendezvous import exchange_members
from barnraise.core.errors import OperationTimeout, ProtocolError

MEMBERS = [GroupMember(bytes([rank]) * 16, 52416 + rank, ("10.0.0.1",)) for rank in range(3)]


def test_exchange_members_returns_same_result_on_all_ranks() -> None:
    store = dist.HashStore()
    results: dict[int, object] = {}

    def join(rank: int) -> None:
        results[rank] = exchange_members(store, rank, 3, MEMBERS[rank], 60)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert results[0] == results[1] == results[2]
    members, fresh = exchange_members(store, 0, 3, MEMBERS[0], 60)
    assert members == tuple(MEMBERS)
    assert len(fresh) == 16
    assert (members, fresh) != results[0], "a group that is formed again has a new name"


def test_exchange_members_timeout_names_missing_ranks() -> None:
    store = dist.HashStore()
    with pytest.raises(OperationTimeout, match="rank 0, rank 2 did not call") as caught:
        exchange_members(store, 1, 3, MEMBERS[1], 0.2)
    assert caught.value.late == (0, 2)


def test_long_wait_names_the_missing_rank_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "_FIRST_REPORT_S", 0.2)
    store = dist.HashStore()
    store.set("key 0", "here")
    late = threading.Timer(1.0, store.set, ("key 1", "here"))
    late.start()
    rendezvous.wait_for_ranks(store, ["key 0", "key 1"], 60)
    assert "waiting for rank 1 to call init_process_group" in caplog.text
    assert "rank 0" not in caplog.text


def test_store_that_fails_at_once_is_not_asked_again() -> None:
    class BrokenStore(dist.HashStore):
        wait_count = 0

        def wait(self, *_: object) -> None:
            self.wait_count += 1
            raise dist.DistStoreError("the connection is gone")

    store = BrokenStore()
    store.set("key 0", "here")
    for keys in (["key 0"], ["key 0", "key 1"]):
        store.wait_count = 0
        with pytest.raises(ProtocolError, match="the connection is gone"):
            rendezvous.wait_for_ranks(store, keys, 60)
        assert store.wait_count == 1


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"\xc1",
        b"x" * 70_000,
        msgspec.msgpack.encode([[b"short", 1, []], "name"]),
        msgspec.msgpack.encode([[b"w" * 16, 0, []], "name"]),
        msgspec.msgpack.encode([[b"w" * 16, 70_000, []], "name"]),
        msgspec.msgpack.encode([[b"w" * 16, 1, ["10.0.0.1"] * 33], "name"]),
        msgspec.msgpack.encode([[b"w" * 16, 1, [7]], "name"]),
    ],
)
def test_invalid_published_entry_is_rejected(entry: bytes) -> None:
    store = dist.HashStore()
    store.set("barnraise/1", entry)
    with pytest.raises(ProtocolError, match="rank 1"):
        exchange_members(store, 0, 2, MEMBERS[0], 5)


def test_one_worker_as_two_ranks_is_rejected() -> None:
    store = dist.HashStore()
    exchange_members(store, 0, 1, MEMBERS[0], 5)
    with pytest.raises(ProtocolError, match="ranks 0 and 1 are one worker"):
        exchange_members(store, 1, 2, MEMBERS[0], 5)
