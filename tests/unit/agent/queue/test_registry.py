"""Records of jobs that a registry accepts, keeps and writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from barnraise.agent.queue import registry as registry_module
from barnraise.agent.queue.messages import JobsHeld, JobUpdate, QueueMessage, decode
from barnraise.agent.queue.registry import JobRegistry
from barnraise.agent.record_store import RecordStore
from barnraise.agent_client.queue.requests import MAX_ADDED
from barnraise.core.errors import MembershipError, ProtocolError, RunError
from barnraise.identity import NodeId, NodeKey
from barnraise.runs.queue.disk_quorum import record_digest
from barnraise.runs.queue.job import (
    JobRecord,
    cancel_job,
    changed_job,
    clear_job,
    decode_job,
    encode_job,
    new_job,
    pause_job,
)
from barnraise.runs.queue.spec import sign_job
from tests.unit.agent.test_record_store import StoreOfCluster
from tests.unit.runs.queue.test_job import KEY, job

OTHER = NodeKey.generate().id


class FakeContext:
    """An agent with a disk and a store of its own; all other machines have the given role."""

    def __init__(self, role: str | None = "owner") -> None:
        self.me, self.storage, self.log, self.member = KEY.id, self, self, self
        self.current = True
        self.disk: dict[int, bytes] = {}
        self.forgotten: list[tuple[int, int]] = []
        self.sent: list[NodeId] = []
        self.messages: list[tuple[NodeId, QueueMessage]] = []
        self.view = self
        self.voters: tuple[bytes, ...] = (KEY.id.raw,)
        self._role = role

    def is_current(self, now: float) -> bool:
        return self.current

    def role(self, node: NodeId) -> str | None:
        return "owner" if node == KEY.id else self._role

    def jobs(self) -> list[tuple[int, bytes]]:
        return sorted(self.disk.items())

    def keep_job(self, number: int, value: bytes) -> None:
        self.disk[number] = value

    def forget_jobs(self, numbers: Iterable[int], forgotten: Iterable[tuple[int, int]]) -> None:
        for number in numbers:
            del self.disk[number]
        self.forgotten = list(forgotten)

    def forgotten_jobs(self) -> list[tuple[int, int]]:
        return self.forgotten

    def linked_nodes(self) -> list[NodeId]:
        return [OTHER]

    def send_bulk(self, node: NodeId, message: bytes) -> None:
        self.sent.append(node)
        self.messages.append((node, decode(message[1:])))

    def name_of(self, node: NodeId) -> str:
        return "nas" if node == OTHER else "mac"

    def answers(self) -> list[QueueMessage]:
        """Return the messages to the other machine since the last call."""
        messages, self.messages = self.messages, []
        return [message for node, message in messages if node == OTHER]


class FakeStore:
    """Compare-and-set as the cluster's store does it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.unwanted: list[str] = []

    def forget(self, names: Iterable[str]) -> None:
        self.unwanted += names

    def reset(self) -> None:
        self.unwanted.clear()

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
        registry.apply_waiting()
        assert registry.jobs == {}
        context.current = True
        registry.apply_waiting()
        assert list(registry.jobs) == [1]
        assert context.answers() == [JobsHeld(((1, record_digest(job(1).record)),))], "it is on this disk now"

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


def test_ended_jobs_of_one_command_are_all_kept() -> None:
    assert MAX_ADDED <= registry_module._MAX_ENDED


def test_last_jobs_that_two_machines_add_at_the_same_time_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_ACTIVE", 2)
    monkeypatch.setattr(registry_module, "_MAX_KEPT", 4)

    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        await registry.write(job(1).record)
        compare_set = store.compare_set

        async def slow(name: str, expected: bytes, desired: bytes) -> bytes:
            registry.apply(job(2).record, OTHER)
            return await compare_set(name, expected, desired)

        monkeypatch.setattr(store, "compare_set", slow)
        await registry.write(job(3).record)
        assert sorted(registry.jobs) == [1, 2, 3]
        with pytest.raises(RunError, match="the queue has 2 jobs already"):
            await registry.write(job(4).record)
        assert registry.apply(job(5).record, OTHER)
        assert not registry.apply(job(6).record, OTHER)

    run(check)


def test_changed_view_checks_roles_again_but_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        await registry.write(job(1).record)
        monkeypatch.setattr(registry_module, "read_job", None)
        monkeypatch.setattr(context, "role", lambda node: None)
        registry.view_changed()
        assert not registry.jobs[1].is_authorized

    run(check)


# what is on disks

BOTH = (KEY.id.raw, OTHER.raw)
ABSENT = NodeKey.generate().id
THREE = (ABSENT.raw, KEY.id.raw, OTHER.raw)  # a quorum needs this machine and the other one


def test_job_is_saved_when_a_quorum_has_confirmed_its_newest_record() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        context.voters = THREE
        calls: list[int] = []
        registry.on_saved = lambda: calls.append(1)
        record = job(1).record
        await registry.write(record)
        assert context.answers() == [JobUpdate(record)]
        assert set(registry.unsaved) == {1}
        registry.receive(OTHER, JobsHeld(((1, record_digest(paused(record))),)))
        registry.receive(OTHER, JobsHeld(((1, b""), (2, b""))))
        assert set(registry.unsaved) == {1}, "the other machine has another record, or none"
        assert context.answers() == [JobUpdate(record)] * 2, "so it gets this one"
        registry.receive(OTHER, JobsHeld(((1, record_digest(record)),)))
        assert not registry.unsaved
        assert calls == [1]
        assert await registry.wait_until_saved([1]) == ""

    run(check)


def test_record_is_confirmed_to_its_sender_and_an_older_one_is_answered_with_the_newer() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        context.voters = THREE
        record = job(1).record
        newer = paused(record)
        registry.receive(OTHER, JobUpdate(newer))
        assert context.answers() == [JobsHeld(((1, record_digest(newer)),))]
        assert not registry.unsaved, "the sender has it on disk as well"
        registry.receive(OTHER, JobUpdate(record))
        assert context.answers() == [JobUpdate(newer)]
        registry.receive(OTHER, JobsHeld(((1, record_digest(newer)), (2, bytes(16))), asks=True))
        assert context.answers() == [JobsHeld(((1, record_digest(newer)), (2, b"")))]

    run(check)


def test_machine_that_was_away_gets_the_records_that_it_lacks() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        for number in (1, 2, 3):
            await registry.write(job(number).record)
        context.answers()
        registry.link_up(OTHER)
        (sent,) = context.answers()
        assert sent.is_all
        assert [number for number, _ in sent.jobs] == [1, 2, 3]
        has_second = ((2, record_digest(job(2).record)),)
        registry.receive(OTHER, JobsHeld(has_second, is_all=True))
        assert context.answers() == [JobUpdate(registry.jobs[number].record) for number in (1, 3)]

    run(check)


def test_change_waits_for_the_disks_and_says_which_machine_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_module, "_SAVED_S", 0.05)

    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        context.voters = (OTHER.raw, KEY.id.raw)
        record = job(1).record
        registry.apply(record)
        with pytest.raises(MembershipError, match="most machines must save it, and nas did not answer"):
            await registry.write(paused(record))
        assert context.answers() == [JobsHeld(((1, record_digest(record)),), asks=True)]
        assert store.values == {}, "a store that lost its contents is not filled from one disk"
        registry.receive(OTHER, JobsHeld(((1, record_digest(record)),)))
        await registry.write(paused(record))
        assert decode_job(store.values["1"]).version == 2

    run(check)


def test_job_of_a_quorum_replaces_another_with_the_same_number() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        context.voters = (OTHER.raw, KEY.id.raw)
        ours, theirs = job(1, retries=9).record, job(1).record
        await registry.write(ours)
        registry.receive(ABSENT, JobUpdate(theirs))
        assert registry.jobs[1].record == ours, "that machine does not vote"
        registry.receive(OTHER, JobUpdate(theirs))
        assert registry.jobs[1].record == theirs
        registry.receive(OTHER, JobsHeld(((1, record_digest(theirs)),)))
        await registry.write(paused(theirs))
        assert decode_job(store.values["1"]) == paused(theirs), "the store had this machine's job"

    run(check)


@pytest.mark.parametrize("version", [2, 9])
def test_end_of_a_quorum_replaces_another_end(version: int) -> None:
    """After a power cut, a machine returns with an end that no other machine had on disk."""

    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        third = NodeKey.generate().id
        context.voters = (KEY.id.raw, OTHER.raw, third.raw)
        own = replace(job(1).record, state="failed", version=5)
        theirs = replace(job(1).record, state="done", version=version)
        registry.apply(own)
        registry.receive(OTHER, JobUpdate(theirs))
        assert registry.jobs[1].record == own, "one machine proves nothing"
        registry.receive(third, JobUpdate(theirs))
        assert registry.jobs[1].record == theirs
        assert decode_job(context.disk[1]) == theirs
        registry.receive(OTHER, JobsHeld(((1, record_digest(theirs)),)))
        assert not registry.unsaved, "the job can be cleared, and others can follow it"

    run(check)


def test_change_of_a_record_that_was_replaced_meanwhile_is_rejected() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        record = job(1).record
        await registry.write(record)
        await registry.write(paused(record))
        with pytest.raises(RunError, match="changed at the same time"):
            await registry.write(changed_job(record, priority=3))
        assert registry.jobs[1].record == paused(record)

    run(check)


@pytest.mark.parametrize("message", [JobUpdate(job(1).record), JobsHeld((), asks=True, is_all=True)])
def test_guest_gets_no_answer_to_any_message(message: QueueMessage) -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        await registry.write(job(2).record)
        with pytest.raises(ProtocolError, match="is a guest"):
            registry.receive(OTHER, message)
        assert context.answers() == []
        assert list(registry.jobs) == [2]

    run(check, role="guest")


def test_machine_outside_the_cluster_gets_no_answer() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        await registry.write(job(2).record)
        with pytest.raises(ProtocolError):
            registry.receive(OTHER, JobsHeld((), asks=True, is_all=True))
        assert context.answers() == []

    run(check, role=None)


# jobs that are not kept any more


def ended(record: JobRecord, at: float) -> JobRecord:
    cancelled = cancel_job(record, "mac", at=at)
    assert cancelled is not None
    return cancelled


def test_forgotten_job_is_not_revived_and_ends_on_a_machine_that_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_module, "_MAX_ENDED", 2)

    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        for number in range(1, 6):
            await registry.write(job(number).record)
            await registry.write(ended(job(number).record, at=float(number)))
        assert sorted(registry.jobs) == sorted(context.disk) == [4, 5]
        assert store.unwanted == ["1", "2", "3"]
        again = JobRegistry(context)  # after a restart of the agent
        again.load()
        ends = []
        for known in (registry, again):
            context.answers()
            known.receive(OTHER, JobUpdate(paused(job(2).record)))
            known.receive(OTHER, JobUpdate(ended(job(2).record, at=2.0)))
            assert sorted(known.jobs) == [4, 5]
            (answer,) = context.answers()
            assert isinstance(answer, JobUpdate), "the end of a job needs no answer"
            ends.append(answer.record)
        assert store.unwanted == ["1", "2", "3", "2"], "that machine may have written its record again"
        away = JobRegistry(FakeContext())  # type: ignore[arg-type]
        away.apply(paused(job(2).record))
        assert away.apply(ends[0], OTHER)
        record = away.jobs[2].record
        assert (record.has_ended, record.is_cleared) == (True, True)
        assert record.why == "it ended while this machine was away"

    run(check)


def test_store_does_not_grow_with_the_number_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_MAX_ENDED", 3)

    async def play() -> None:
        context: Any = FakeContext()
        context.kv = cluster = StoreOfCluster()
        registry = JobRegistry(context)
        assert isinstance(registry._records, RecordStore)
        sizes = []
        for number in range(1, 13):
            await registry.write(job(number).record)
            await registry.write(ended(job(number).record, at=float(number)))
            await registry._records.delete_some(registry._needs_key)
            (space,) = cluster.store._namespaces.values()
            sizes.append(len(space.values))
        assert sizes == [1, 2, 3, *([3] * 9)]

    asyncio.run(play())


def test_key_of_a_cleared_job_is_deleted_but_not_that_of_the_newest() -> None:
    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        for number in (1, 2):
            await registry.write(job(number).record)
            record = ended(job(number).record, at=1.0)
            await registry.write(record)
            cleared = clear_job(record)
            assert cleared is not None
            await registry.write(cleared)
        assert store.unwanted == ["1", "2"]
        assert [registry._needs_key(name) for name in ("1", "2", "3")] == [False, True, False]

    run(check)


def test_forgotten_numbers_of_an_old_cluster_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_MAX_ENDED", 0)

    async def check(registry: JobRegistry, context: Any, store: FakeStore) -> None:
        for number in (1, 2):
            await registry.write(job(number).record)
            await registry.write(ended(job(number).record, at=1.0))
        assert not registry.apply(job(1).record, OTHER)
        registry.reset()
        assert registry.apply(job(1).record, OTHER)

    run(check)
