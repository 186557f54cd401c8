"""Tests of what machines know about the files of others, and of jobs that wait for files."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from barnraise.agent.queue import service as service_module
from barnraise.agent.queue.held_files import HeldFiles
from barnraise.agent.queue.messages import FilesHeld, encode
from barnraise.agent.queue.service import QueueService
from barnraise.core.errors import ProtocolError, ShippingError
from barnraise.identity import NodeId
from barnraise.runs.queue.job import KnownJob, cancel_job, new_job
from barnraise.runs.queue.spec import sign_job
from tests.unit.agent.queue.test_registry import OTHER, FakeContext
from tests.unit.runs.queue.test_job import KEY, job

FOLDER = bytes(32)
BY, MAC, PC = KEY.id.raw, bytes([1]) * 32, bytes([2]) * 32


def test_job_waits_while_no_present_machine_has_its_files() -> None:
    held, waiting = HeldFiles(), job(7)
    assert held.absent([waiting], MAC, {BY, MAC}) == {}, "the machine that added it is here"
    assert held.absent([waiting], MAC, {MAC, PC}) == {7: (BY,)}
    held.note(PC, [FOLDER])
    assert held.absent([waiting], MAC, {MAC, PC}) == {}
    assert held.absent([waiting], MAC, {MAC}) == {7: (BY, PC)}
    held.own = frozenset([FOLDER])
    assert held.absent([waiting], MAC, {MAC}) == {}
    held.own = frozenset()
    held.keep_only([MAC])
    assert held.absent([waiting], MAC, {MAC}) == {7: (BY,)}


def test_job_that_runs_or_has_ended_does_not_wait_for_files() -> None:
    running = replace(job(1), record=replace(job(1).record, state="running"))
    ended = cancel_job(job(2).record, "mac")
    assert ended is not None
    assert HeldFiles().absent([running, replace(job(2), record=ended)], MAC, {MAC}) == {}


class Agent(FakeContext):
    """An agent with some files, which can fetch no others."""

    def __init__(self, *here: bytes) -> None:
        super().__init__()
        self.here = set(here)
        self.owners, self.members, self.limits, self.settings = (KEY.id, OTHER), (), self, None
        self.artifacts, self.checkpoints, self.local, self.registry = self, self, self, SimpleNamespace()

    def reason_against(self, by: bytes) -> str:
        return "it is paused"  # so only what is here counts

    def allow_files(self, manifests: Any) -> None:
        return

    def has_all(self, manifest: bytes) -> bool:
        return manifest in self.here

    async def fetch(self, manifest: bytes, *_: Any, **__: Any) -> None:
        raise ShippingError("no machine sent the list of files")


def service(agent: Agent, *jobs: KnownJob) -> QueueService:
    queue = QueueService(agent, agent)  # type: ignore[arg-type]
    for known in jobs:
        queue.registry.jobs[known.number] = known
    return queue


def told(agent: Agent) -> list[tuple[bytes, ...]]:
    return [message.manifests for message in agent.answers() if isinstance(message, FilesHeld)]


async def look(queue: QueueService) -> None:
    """Let the queue look for files once."""
    looks = asyncio.create_task(queue._keep_files())
    await asyncio.sleep(0.05)
    looks.cancel()


def with_folder(number: int, folder: bytes) -> KnownJob:
    known = job(number)
    spec = replace(known.spec, program=replace(known.spec.program, folder=folder))
    return replace(known, spec=spec, record=new_job(sign_job(spec, KEY)))


def test_machine_tells_others_which_files_it_has() -> None:
    async def check() -> None:
        agent = Agent(FOLDER)
        queue = service(agent, job(1), with_folder(2, b"2" * 32))
        await look(queue)
        assert told(agent) == [(FOLDER,)], "also while it is paused"
        await look(queue)
        assert told(agent) == [], "nothing has changed"
        queue.link_up(OTHER)
        assert told(agent) == [(FOLDER,)]
        del queue.registry.jobs[1]
        await look(queue)
        assert told(agent) == [()]

    asyncio.run(check())


def test_files_of_a_machine_that_is_off_do_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch from a machine that is off waits for minutes."""
    off, away, whole = NodeId(PC), b"1" * 32, b"3" * 32

    async def check() -> None:
        agent = Agent(FOLDER)
        queue = service(agent, with_folder(1, away), job(2), with_folder(3, whole), with_folder(4, b"4" * 32))
        sources = {away: off, FOLDER: OTHER, whole: OTHER, b"4" * 32: off}
        queue._held.note(OTHER.raw, [b"4" * 32])  # which one that is here has meanwhile
        rows = [(manifest, [source], None) for manifest, source in sources.items()]
        monkeypatch.setattr(queue, "_missing_files", lambda: rows)
        fetched: list[bytes] = []

        async def fetch(manifest: bytes, *_: Any, **__: Any) -> None:
            fetched.append(manifest)
            if manifest == away:
                await asyncio.Event().wait()

        monkeypatch.setattr(agent, "fetch", fetch)
        await look(queue)
        assert fetched == [whole, b"4" * 32]
        assert told(agent)[0] == (FOLDER,), "what is here is told first"
        monkeypatch.setattr(service_module, "_KEEP_S", 0.01)
        seeks = asyncio.create_task(queue._seek_files())
        await asyncio.sleep(0.05)
        seeks.cancel()
        assert fetched == [whole, b"4" * 32, away]

    asyncio.run(check())


def test_files_that_an_owner_reports_count_and_those_of_a_guest_do_not() -> None:
    async def check(role: str) -> dict[int, tuple[bytes, ...]]:
        agent = Agent()
        agent._role = role
        queue = service(agent, job(7))
        queue.received(OTHER, memoryview(encode(FilesHeld((FOLDER,))))[1:])
        return queue._held.absent([job(7)], MAC, {MAC, OTHER.raw})

    assert asyncio.run(check("owner")) == {}
    with pytest.raises(ProtocolError, match="is a guest"):
        asyncio.run(check("guest"))


def test_files_are_fetched_again_at_once_after_a_new_connection() -> None:
    async def check() -> None:
        agent = Agent()
        queue = service(agent, job(1))
        queue._retry_at[FOLDER] = float("inf")
        queue.link_up(NodeId(MAC))
        assert queue._retry_at == {}
        assert not told(agent), "it has not looked yet"

    asyncio.run(check())


def test_files_of_the_old_cluster_are_forgotten() -> None:
    async def check() -> None:
        queue = service(Agent(FOLDER), job(1))
        await look(queue)
        queue._held.note(OTHER.raw, [FOLDER])
        queue.reset()
        assert (queue._held.own, queue.registry.jobs) == (None, {})
        assert queue._held.absent([job(1)], MAC, {MAC, OTHER.raw}) == {1: (BY,)}

    asyncio.run(check())
