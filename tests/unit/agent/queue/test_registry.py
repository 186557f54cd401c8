"""Records of jobs that a registry accepts, keeps and writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from msgspec.structs import replace

from barnraise.agent.queue.registry import JobRegistry
from barnraise.core.errors import MembershipError, ProtocolError, RunError
from barnraise.identity import NodeId, NodeKey
from barnraise.runs.queue.job import (
    JobRecord,
    cancel_job,
    changed_job,
    decode_job,
    encode_job,
    new_job,
    pause_job,
)
from barnraise.runs.queue.spec import sign_job
from tests.unit.runs.queue.test_job import KEY, job

OTHER = NodeKey.generate().id


class FakeContext:
    """An agent with a disk and a store of its own; all other machines have the given role."""

    def __init__(self, role: str | None = "owner") -> None:
        self.me, self.storage, self.log, self.member = KEY.id, self, self, self
        self.current = True
        self.disk: dict[int, bytes] = {}
        self.sent: list[NodeId] = []
        self._role = role

    def is_current(self, now: float) -> bool:
        return self.current

    def role(self, node: NodeId) -> str | None:
        return "owner" if node == KEY.id else self._role

    def jobs(self) -> list[tuple[int, bytes]]:
        return sorted(self.disk.items())

    def keep_job(self, number: int, value: bytes) -> None:
        self.disk[number] = value

    def forget_job(self, number: int) -> None:
        del self.disk[number]

    def linked_nodes(self) -> list[NodeId]:
        return [OTHER]

    def send_bulk(self, node: NodeId, message: bytes) -> None:
        self.sent.append(node)


class FakeStore:
    """Compare-and-set as the cluster's store does it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    async def compare_set(self, name: str, expected: bytes, desired: bytes) -> bytes:
        current = self.values.get(name)
        if (current or b"") == expected:
            self.values[name] = desired
            return desired
        return expected if current is None else current


def run(
    check: Callable[[JobRegistry, Any, FakeStore], Coroutine[Any, Any, None]], role: str | None = "owner"
) -> None:
    async def play() -> None:
        context: Any = FakeContext(role)
        registry = JobRegistry(context)
        store = FakeStore()
        registry._records = store  # type: ignore[assignment]
        await check(registry, context, store)

    asyncio.run(play())


def paused(record: JobRecord) -> JobRecord:
    changed = pause_job(record, is_paused=not record.is_paused)
    assert changed is not None
    return changed


def test_written_job_is_stored_sent_and_loaded_again() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        record = job(1).record
        await registry.write(record)
        await registry.write(paused(record))
        assert decode_job(store.values["1"]) == decode_job(context.disk[1]) == registry.jobs[1].record
        assert context.sent == [OTHER, OTHER]
        assert registry.next_number == 2
        again = JobRegistry(context)
        again.load()
        assert again.jobs == registry.jobs

    run(check)


def test_guests_neither_change_nor_receive_jobs() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        with pytest.raises(ProtocolError, match="is a guest"):
            registry.apply(job(1).record, OTHER)
        await registry.write(job(1).record)
        registry.link_up(OTHER)
        assert context.sent == []

    run(check, role="guest")


def test_job_of_an_unknown_machine_is_ignored() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        stranger = NodeKey.generate()
        spec = replace(job(1).spec, by=stranger.id.raw)
        assert not registry.apply(new_job(sign_job(spec, stranger)))
        assert registry.jobs == {}

    run(check, role=None)


def test_older_versions_and_changed_ends_are_ignored() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        record = job(1).record
        newer = paused(record)
        assert registry.apply(newer, OTHER)
        assert not registry.apply(record, OTHER)
        cancelled = cancel_job(newer, "mac")
        assert cancelled is not None
        assert registry.apply(cancelled, OTHER)
        assert not registry.apply(replace(cancelled, state="done", version=99), OTHER)
        assert not registry.apply(replace(job(1, retries=9).record, version=99), OTHER)
        assert registry.jobs[1].record == cancelled

    run(check)


def test_record_that_came_without_a_quorum_waits() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        context.current = False
        assert not registry.apply(job(1).record, OTHER)
        registry.apply_held()
        assert registry.jobs == {}
        context.current = True
        registry.apply_held()
        assert list(registry.jobs) == [1]

    run(check)


def test_two_changes_at_the_same_time_count_once() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        record = job(1).record
        await registry.write(record)
        elsewhere = changed_job(record, priority=7)
        store.values["1"] = encode_job(elsewhere)
        with pytest.raises(RunError, match="job 1 was changed at the same time"):
            await registry.write(paused(record))
        assert registry.jobs[1].record == elsewhere
        context.current = False
        store.values["1"] = encode_job(changed_job(elsewhere, priority=8))
        with pytest.raises(MembershipError, match="no quorum"):
            await registry.write(paused(elsewhere))

    run(check)


@pytest.mark.parametrize("left", ["nothing", "an older version"])
def test_store_that_lost_its_contents_takes_the_known_version(left: str) -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        record = job(1).record
        newer = paused(record)
        await registry.write(record)
        await registry.write(newer)
        store.values = {} if left == "nothing" else {"1": encode_job(record)}
        await registry.write(paused(newer))
        assert decode_job(store.values["1"]).version == 3

    run(check)


def test_two_histories_with_one_version_become_one_and_the_job_can_be_changed() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        record = job(1).record
        histories = [changed_job(record, priority=1), changed_job(record, priority=2)]
        kept = []
        for own, other in (histories, histories[::-1]):
            registry.reset()
            store.values = {}
            registry.apply(own, OTHER)
            registry.apply(other, OTHER)
            kept.append(registry.jobs[1].record)
            store.values["1"] = encode_job(other)
            await registry.write(paused(registry.jobs[1].record))
            assert decode_job(store.values["1"]) == registry.jobs[1].record
        assert kept[0] == kept[1]

    run(check)


def test_change_in_the_store_with_the_known_version_is_not_refused_for_ever() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        record = job(1).record
        histories = sorted((changed_job(record, priority=number) for number in (1, 2)), key=encode_job)
        registry.apply(histories[0])
        store.values["1"] = encode_job(histories[1])
        with pytest.raises(RunError, match="changed at the same time"):
            await registry.write(paused(registry.jobs[1].record))
        await registry.write(paused(registry.jobs[1].record))
        assert registry.jobs[1].record == paused(histories[1])

    run(check)


def test_end_stays_when_another_history_has_gone_on() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        record = job(1).record
        other_history = replace(record, version=9, priority=1)
        cancelled = cancel_job(record, "mac")
        assert cancelled is not None
        registry.apply(other_history, OTHER)
        assert registry.apply(cancelled, OTHER), "the end is taken although its version is smaller"
        assert not registry.apply(replace(other_history, version=10), OTHER)
        assert registry.jobs[1].record == cancelled

    run(check)
