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
from barnraise.agent_client.cluster_requests import AgentResponse, RequestDone, encode
from barnraise.agent_client.queue.requests import (
    AddJobsRequest,
    ChangeJobsRequest,
    JobResultsRequest,
    JobRow,
    JobsAdded,
    ListJobsRequest,
    MoveJobRequest,
    QueueRequest,
    QueueResponse,
)
from barnraise.agent_client.run_options import RunProgram
from barnraise.core.errors import MembershipError, RunError
from barnraise.runs.queue.job import JobAttempt, JobRecord, changed_job, decode_job, end_forgotten
from barnraise.transport.ipc.messages import LARGEST_BODY
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
    [
        ADD,
        ListJobsRequest(),
        ChangeJobsRequest(action="cancel", jobs=(1,)),
        MoveJobRequest(job=1),
        JobResultsRequest(1),
    ],
    ids=lambda request: type(request).__name__,
)
def test_guest_can_neither_see_nor_add_nor_change_jobs(request_: QueueRequest) -> None:
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


def test_job_that_the_store_may_have_is_not_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(agent: Any, context: FakeContext, store: FakeStore) -> None:
        async def late(*_: object) -> bytes:
            raise MembershipError("the cluster cannot store the job now")

        first = store.compare_set
        monkeypatch.setattr(store, "compare_set", late)
        with pytest.raises(MembershipError, match="not known whether job 1 was added") as caught:
            await queue_api.answer(agent, ADD)
        assert "before you add it again" in caught.value.hint
        monkeypatch.setattr(store, "compare_set", first)
        assert await queue_api.answer(agent, ADD) == JobsAdded((1, 2))

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


async def add_while(
    agent: Any, context: FakeContext, answer: Callable[[JobRecord], JobRecord]
) -> AgentResponse:
    """Add two jobs while another machine has a record of its own for the first number."""
    context.voters = (OTHER.raw, KEY.id.raw)
    adding = asyncio.ensure_future(queue_api.answer(agent, ADD))
    registry = agent.queue.registry
    while 1 not in registry.jobs:
        await asyncio.sleep(0)
    registry.receive(OTHER, JobUpdate(answer(registry.jobs[1].record)))
    for number in (2, 3):
        while number not in registry.jobs:
            await asyncio.sleep(0.01)
        registry.receive(OTHER, JobUpdate(registry.jobs[number].record))
    return await adding


def test_number_that_most_machines_know_as_another_job_is_not_taken() -> None:
    """After a power cut the store is empty, and this machine did not know the job of the others."""

    async def check(agent: Any, context: FakeContext, store: FakeStore) -> None:
        theirs = job(1, retries=9).record
        assert await add_while(agent, context, lambda ours: theirs) == JobsAdded((2, 3))
        assert agent.queue.registry.jobs[1].record == theirs

    run(check)


def test_number_of_a_job_that_the_others_have_forgotten_is_not_taken() -> None:
    """A machine that is new in the cluster adds a job before it knows those of the others."""

    async def check(agent: Any, context: FakeContext, store: FakeStore) -> None:
        assert await add_while(agent, context, end_forgotten) == JobsAdded((2, 3))

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
        done = RequestDone("cancelled 0 jobs; job 1 is cancelled")
        assert await queue_api.answer(agent, cancel) == done, "it is done by now"

    run(check)


def test_cancel_without_a_number_names_nothing_to_cancel() -> None:
    async def check(agent: Any, context: FakeContext, store: FakeStore) -> None:
        await queue_api.answer(agent, ADD)
        with pytest.raises(RunError, match="no job was named"):
            await queue_api.answer(agent, ChangeJobsRequest(action="cancel"))
        assert await queue_api.answer(agent, ChangeJobsRequest(action="cancel", jobs=(2,))) == RequestDone(
            "cancelled 1 job"
        )
        again = await queue_api.answer(agent, ChangeJobsRequest(action="cancel", jobs=(1, 2)))
        assert again == RequestDone("cancelled 1 job; job 2 is cancelled"), "why one was not changed"
        again = await queue_api.answer(agent, ChangeJobsRequest(action="pause", jobs=(1,)))
        assert again == RequestDone("paused 0 jobs; job 1 is cancelled")
        assert [job.record.state for job in agent.queue.registry.jobs.values()] == ["cancelled"] * 2

    run(check)


def test_pause_without_a_number_leaves_running_jobs_and_ended_ones() -> None:
    async def check(agent: Any, context: FakeContext, store: FakeStore) -> None:
        await queue_api.answer(agent, ADD)
        registry = agent.queue.registry
        attempt = JobAttempt(number=1, nodes=(KEY.id.raw,))
        await registry.write(changed_job(registry.jobs[1].record, state="running", attempts=(attempt,)))
        assert await queue_api.answer(agent, ChangeJobsRequest(action="pause")) == RequestDone("paused 1 job")
        assert [job.record.is_paused for job in registry.jobs.values()] == [False, True]
        assert await queue_api.answer(agent, ChangeJobsRequest(action="pause", jobs=(1,))) == RequestDone(
            "paused 1 job"
        )
        resumed = await queue_api.answer(agent, ChangeJobsRequest(action="resume"))
        assert resumed == RequestDone("resumed 2 jobs")

    run(check)


def test_list_of_thousands_of_jobs_with_long_commands_can_be_sent() -> None:
    row = JobRow(
        job=2**31,
        state="failed",
        by="macbook",
        at=1.7e9,
        title="train",
        command=("train.py", *(f"--option-{number}=value" for number in range(60))),
        each="device",
        run="train-q2147483648-99-k3fz",
        machines=("workstation",),
        device="cuda:0",
        why="exited with code 1: " + "x" * 1500,
    )
    short = queue_api._fitted(QueueResponse(jobs=(row,) * 2500))
    assert len(encode(short)) <= LARGEST_BODY
    assert len(short.jobs) == 2500
    assert short.jobs[0].command[0] == "train.py"
    assert short.jobs[0].why.startswith("exited with code 1: x")
    few = QueueResponse(jobs=(row,) * 100)
    assert queue_api._fitted(few) == few
