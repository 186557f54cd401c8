"""Requests about the queue: which machines may send them, and what they answer while machines are away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from barnraise.agent.api import queue_api
from barnraise.agent.queue import registry as registry_module
from barnraise.agent.queue.messages import JobUpdate
from barnraise.agent.queue.registry import JobRegistry
from barnraise.agent_client.cluster_requests import RequestDone
from barnraise.agent_client.queue.requests import (
    AddJobsRequest,
    ChangeJobsRequest,
    JobResultsRequest,
    JobsAdded,
    MoveJobRequest,
    QueueRequest,
)
from barnraise.agent_client.run_options import RunProgram
from barnraise.core.errors import MembershipError, RunError
from barnraise.runs.queue.job import decode_job
from tests.unit.agent.queue.test_registry import OTHER, FakeContext, FakeStore
from tests.unit.runs.queue.test_job import KEY, job

ADD = AddJobsRequest(
    program=RunProgram(command=("train.py",), folder=bytes(32)),
    commands=(("train.py", "1"), ("train.py", "2")),
)


def run(
    check: Callable[[Any, FakeContext, FakeStore], Coroutine[Any, Any, None]], role: str = "owner"
) -> None:
    """Play with an agent whose cluster has one other machine, which answers nothing by itself."""

    async def play() -> None:
        context, store = FakeContext(), FakeStore()
        registry = JobRegistry(context)  # type: ignore[arg-type]
        registry._records = store  # type: ignore[assignment]
        agent = SimpleNamespace(
            me=KEY.id,
            key=KEY,
            name="mac",
            log=SimpleNamespace(role=lambda node: role),
            queue=SimpleNamespace(registry=registry),
            audit=SimpleNamespace(write=lambda *_, **__: None),
            report_event=lambda text: None,
        )
        await check(agent, context, store)

    asyncio.run(play())


@pytest.mark.parametrize(
    "request_",
    [ADD, ChangeJobsRequest(action="cancel", jobs=(1,)), MoveJobRequest(job=1), JobResultsRequest(1)],
    ids=lambda request: type(request).__name__,
)
def test_guest_can_neither_add_nor_change_jobs(request_: QueueRequest) -> None:
    async def check(agent: Any, context: FakeContext, store: FakeStore) -> None:
        with pytest.raises(RunError, match="guests cannot use the queue"):
            await queue_api.answer(agent, request_)
        assert store.values == {}
        assert agent.queue.registry.jobs == {}

    run(check, role="guest")


def test_jobs_are_added_under_the_next_numbers() -> None:
    async def check(agent: Any, context: FakeContext, store: FakeStore) -> None:
        assert await queue_api.answer(agent, ADD) == JobsAdded((1, 2))
        assert await queue_api.answer(agent, ADD) == JobsAdded((3, 4))
        assert {name: decode_job(value).version for name, value in store.values.items()} == dict.fromkeys(
            ("1", "2", "3", "4"), 1
        )

    run(check)


def test_job_that_is_on_one_disk_only_is_said_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_SAVED_S", 0.02)

    async def check(agent: Any, context: FakeContext, store: FakeStore) -> None:
        context.voters = (OTHER.raw, KEY.id.raw)
        added = await queue_api.answer(agent, ADD)
        assert isinstance(added, JobsAdded)
        assert added.jobs == (1,)
        assert added.sentence.startswith(
            "job 1 cannot start yet: most machines must save it, and nas did not"
        )
        assert added.sentence.endswith("; 1 other job could not be added")

    run(check)


def test_number_that_most_machines_know_as_another_job_is_not_taken() -> None:
    """After a power cut the store is empty, and this machine did not know the job of the others."""

    async def check(agent: Any, context: FakeContext, store: FakeStore) -> None:
        context.voters = (OTHER.raw, KEY.id.raw)
        adding = asyncio.ensure_future(queue_api.answer(agent, ADD))
        registry = agent.queue.registry
        while 1 not in registry.jobs:
            await asyncio.sleep(0)
        theirs = job(1, retries=9).record
        registry.receive(OTHER, JobUpdate(theirs))
        for number in (2, 3):
            while number not in registry.jobs:
                await asyncio.sleep(0.01)
            registry.receive(OTHER, JobUpdate(registry.jobs[number].record))
        assert await adding == JobsAdded((2, 3))
        assert registry.jobs[1].record == theirs

    run(check)


def test_change_that_a_power_cut_could_undo_is_not_reported_as_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_SAVED_S", 0.02)

    async def check(agent: Any, context: FakeContext, store: FakeStore) -> None:
        cancel = ChangeJobsRequest(action="cancel", jobs=(1,))
        await queue_api.answer(agent, ADD)
        context.voters = (OTHER.raw, KEY.id.raw)
        with pytest.raises(MembershipError, match=r"jobs cannot be changed now: .* nas did not answer"):
            await queue_api.answer(agent, cancel)
        registry = agent.queue.registry
        assert registry.jobs[1].record.state == "waiting"
        registry.receive(OTHER, JobUpdate(registry.jobs[1].record))
        with pytest.raises(MembershipError, match="1 job changed, but a power cut could undo that"):
            await queue_api.answer(agent, cancel)
        registry.receive(OTHER, JobUpdate(registry.jobs[1].record))
        assert await queue_api.answer(agent, cancel) == RequestDone("cancelled 0 jobs"), "it is done by now"

    run(check)


def test_cancel_without_a_number_names_nothing_to_cancel() -> None:
    async def check(agent: Any, context: FakeContext, store: FakeStore) -> None:
        await queue_api.answer(agent, ADD)
        with pytest.raises(RunError, match="no job was named"):
            await queue_api.answer(agent, ChangeJobsRequest(action="cancel"))
        assert await queue_api.answer(agent, ChangeJobsRequest(action="cancel", jobs=(2,))) == RequestDone(
            "cancelled 1 job"
        )
        assert [job.record.state for job in agent.queue.registry.jobs.values()] == ["waiting", "cancelled"]

    run(check)
