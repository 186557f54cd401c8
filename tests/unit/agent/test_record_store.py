"""Records in the cluster's key-value store: which keys a coordinator deletes, and what a full store says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from barnraise.agent import record_store
from barnraise.agent.record_store import RecordStore
from barnraise.agent_client.kv_messages import LOBBY, KvDenied, Namespace, Operation, Result
from barnraise.core.errors import MembershipError
from barnraise.identity import NodeKey
from barnraise.kvstore.store import IN_MEMORY, KeyValueStore, StoreRules

SCOPE = Namespace("@runs", LOBBY)
ME = NodeKey.generate().id


class StoreOfCluster:
    """The store and the membership of a cluster, as one machine sees them."""

    def __init__(self, rules: StoreRules = IN_MEMORY) -> None:
        self.me, self.kv, self.member = ME, self, self
        self.store = KeyValueStore(b"founding", rules)
        self.number = 0
        self.has_quorum = self.is_first = True

    async def request(self, operation: Operation, patience_s: float) -> Result:
        if not self.has_quorum:
            return KvDenied("late", "most of the machines are away", "Wait.")
        self.number += 1
        return self.store.apply(operation, self.number)

    def quorum_status(self, now: float) -> Any:
        return SimpleNamespace(decides=self.has_quorum)

    def is_current(self, now: float) -> bool:
        return self.has_quorum

    def coordinator(self, now: float) -> tuple[bytes, str]:
        return ME.raw if self.is_first else bytes(32), ""

    def has(self, name: str) -> bool:
        return self.store.has(SCOPE, name)


def records_in(cluster: StoreOfCluster) -> RecordStore:
    return RecordStore(cluster, SCOPE, "run", "Stop some.")  # type: ignore[arg-type]


async def written(cluster: StoreOfCluster, *names: str) -> RecordStore:
    """Return records after these were written and forgotten."""
    records = records_in(cluster)
    for name in names:
        assert await records.compare_set(name, b"", b"record") == b"record"
    records.forget(names)
    return records


def test_forgotten_keys_are_deleted_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_store, "_DELETED_AT_ONCE", 2)

    async def play() -> None:
        cluster = StoreOfCluster()
        records = await written(cluster, "a", "b", "c")
        await records.delete_some(lambda name: False)
        assert [name for name in "abc" if cluster.has(name)] == ["c"]
        await records.delete_some(lambda name: False)
        assert not cluster.has("c")
        before = cluster.number
        await records.delete_some(lambda name: False)
        assert cluster.number == before

    asyncio.run(play())


def test_key_that_is_needed_again_stays() -> None:
    async def play() -> None:
        cluster = StoreOfCluster()
        records = await written(cluster, "a", "b")
        await records.delete_some({"a"}.__contains__)
        assert [name for name in "ab" if cluster.has(name)] == ["a"]

    asyncio.run(play())


def test_deletion_without_a_quorum_is_repeated_and_late_ones_do_not_delay_writes() -> None:
    async def play() -> None:
        cluster = StoreOfCluster()
        records = await written(cluster, "a")
        cluster.has_quorum = False
        await records.delete_some(lambda name: False)
        cluster.has_quorum = True
        assert cluster.has("a")
        await records.delete_some(lambda name: False)
        assert not cluster.has("a")
        assert await records.compare_set("a", b"", b"again") == b"again"

    asyncio.run(play())


@pytest.mark.parametrize("is_first", [True, False])
def test_only_the_coordinator_deletes_keys(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_store, "_DELETE_S", 0.005)

    async def play() -> None:
        cluster = StoreOfCluster()
        cluster.is_first = is_first
        records = await written(cluster, "a")
        deletes = asyncio.create_task(records.delete_forgotten(lambda name: False))
        await asyncio.sleep(0.1)
        deletes.cancel()
        assert cluster.has("a") != is_first

    asyncio.run(play())


def test_names_to_delete_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_store, "MAX_UNWANTED", 2)

    async def play() -> None:
        cluster = StoreOfCluster()
        records = await written(cluster, "a", "b", "c")
        await records.delete_some(lambda name: False)
        assert [name for name in "abc" if cluster.has(name)] == ["a"]

    asyncio.run(play())


def test_full_store_says_what_to_do_about_its_records() -> None:
    async def play() -> None:
        records = records_in(StoreOfCluster(StoreRules(max_namespace_bytes=100)))
        with pytest.raises(MembershipError) as caught:
            await records.compare_set("a", b"", bytes(200))
        assert caught.value.hint == "Stop some."
        assert "its records of runs take all of their space" in caught.value.message

    asyncio.run(play())
