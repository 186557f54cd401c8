"""API handlers for the queue: add, list, change and move jobs, and bring their results."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from barnraise.agent.daemon import Agent
from barnraise.agent_client.cluster_requests import AgentResponse, RequestDone, encode
from barnraise.agent_client.queue.requests import (
    METRIC_VARIABLE,
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
from barnraise.agent_client.run_requests import ResultsResponse, TrainingProgress
from barnraise.artifacts import folder_limits
from barnraise.core.errors import BarnraiseError, MembershipError, RunError
from barnraise.core.units import counted
from barnraise.identity import NodeId
from barnraise.runs.control.worker_status import training_progress
from barnraise.runs.queue.job import (
    JobRecord,
    KnownJob,
    cancel_job,
    check_after,
    clear_job,
    move_job,
    new_job,
    pause_job,
    prioritize_job,
    queue_order,
)
from barnraise.runs.queue.scheduler import QueueDecision, decide
from barnraise.runs.queue.spec import JobSpec, sign_job

_TRIES = 20
_MOST_STATES = 4  # of jobs that were not changed
_MAX_RESPONSE = 960 << 10
_SHORTER = (1000, 200, 60, 20)  # characters of a command or a reason
_PERSON = "this machine's user"  # at the local interface


async def answer(agent: Agent, request: QueueRequest) -> AgentResponse:
    """Answer one request about the queue of a process of this machine's user."""
    if agent.log.role(agent.me) != "owner":  # a guest knows no job: an empty list would mislead
        raise RunError(
            "guests cannot use the queue",
            hint="Do it on a machine that `barnraise nodes` shows as owner.",
        )
    match request:
        case AddJobsRequest():
            return await _add(agent, request)
        case ListJobsRequest():
            return _list(agent)
        case ChangeJobsRequest():
            return await _change(agent, request)
        case MoveJobRequest():
            return await _move(agent, request)
        case JobResultsRequest():
            return await _results(agent, request.job)


# add


async def _add(agent: Agent, request: AddJobsRequest) -> JobsAdded:
    nodes = tuple(dict.fromkeys(_owner(agent, name).raw for name in request.on))
    check_after(agent.queue.registry.jobs.keys(), request.job.after)
    settings = request.program.settings
    if request.job.metric:
        settings = (*settings, (METRIC_VARIABLE, request.job.metric))
    added: list[int] = []
    for command in request.commands:
        program = replace(request.program, command=command, settings=settings)
        try:
            added.append(await _add_one(agent, request, program, nodes))
            unsaved = await agent.queue.registry.wait_until_saved(added[-1:])
        except BarnraiseError as error:
            if not added:
                raise
            rest = counted(len(request.commands) - len(added), "job")
            return JobsAdded(tuple(added), f"{rest} not confirmed: {error.message}. {error.hint}")
        if unsaved:
            left = len(request.commands) - len(added)
            rest = f"; {counted(left, 'other job')} could not be added" if left else ""
            return JobsAdded(tuple(added), f"job {added[-1]} cannot start yet: {unsaved}{rest}")
    return JobsAdded(tuple(added))


def _owner(agent: Agent, name: str) -> NodeId:
    node = agent.find(name)
    if agent.log.role(node) != "owner":
        raise RunError(
            f"{agent.name_of(node)} is a guest: its user would have to accept each job",
            hint="Name machines that `barnraise nodes` shows as owner.",
        )
    return node


async def _add_one(
    agent: Agent, request: AddJobsRequest, program: RunProgram, nodes: tuple[bytes, ...]
) -> int:
    """Add a job under the next free number; try again if another machine takes that number first."""
    registry = agent.queue.registry
    for _ in range(_TRIES):
        number = registry.next_number
        spec = JobSpec(
            job=number,
            by=agent.me.raw,
            at=time.time(),
            program=program,
            options=request.options,
            job_options=request.job,
            nodes=nodes,
        )
        signed = sign_job(spec, agent.key)
        try:
            await registry.write(new_job(signed, request.priority))
        except RunError:
            if number not in registry.jobs:  # it is another error
                raise
            continue
        except MembershipError as error:  # the store may have the record, or get it later
            raise MembershipError(
                f"it is not known whether job {number} was added: {error.message}",
                hint="Wait until most of the machines are here (`barnraise status`). "
                "Look at `barnraise queue` before you add it again.",
            ) from error
        await registry.wait_until_saved([number])
        added = registry.jobs.get(number)
        if added is None or added.record.signed != signed or added.record.is_cleared:
            continue  # other machines have or had another job with this number, which this one did not know
        agent.report_event(f"job {number} was added: {shlex.join(program.command)}")
        return number
    raise RunError("other machines add jobs at the same time", hint="Try again.")


# list


def _list(agent: Agent) -> QueueResponse:
    jobs = agent.queue.registry.jobs
    decision = decide(agent.queue.observe())
    ended = sorted((job for job in jobs.values() if job.record.has_ended), key=lambda job: job.number)
    active = queue_order(job for job in jobs.values() if not job.record.has_ended)
    active.sort(key=lambda job: job.record.state != "running")
    shown = [job for job in (*ended, *active) if not job.record.is_cleared]
    return _fitted(
        QueueResponse(
            jobs=tuple(_row(agent, job, decision) for job in shown), sentence=agent.blocked_reason()
        )
    )


def _fitted(response: QueueResponse) -> QueueResponse:
    """Return a response that is not too large to send: of thousands of jobs, long texts are shortened."""
    for length in _SHORTER:
        if len(encode(response)) <= _MAX_RESPONSE:
            break
        response = replace(response, jobs=tuple(_shortened(row, length) for row in response.jobs))
    return response


def _shortened(row: JobRow, length: int) -> JobRow:
    def cut(text: str) -> str:
        return text if len(text) <= length else f"{text[:length]}..."

    command = row.command
    if sum(map(len, command)) > length:
        command = (*command[:1], cut(shlex.join(command[1:])))
    return replace(row, command=command, why=cut(row.why), results_note=cut(row.results_note))


def _row(agent: Agent, job: KnownJob, decision: QueueDecision) -> JobRow:
    spec, record = job.spec, job.record
    attempt = record.attempts[-1] if record.attempts else None
    return JobRow(
        job=job.number,
        state=record.state,
        by=agent.name_of(NodeId(spec.by)),
        at=spec.at,
        title=spec.options.title,
        command=spec.program.command,
        each=spec.job_options.each,
        priority=record.priority,
        is_paused=record.is_paused,
        after=spec.job_options.after,
        tries=len(record.attempts),
        run=job.run,
        machines=tuple(agent.name_of(NodeId(node)) for node in attempt.nodes) if attempt else (),
        device=attempt.device if attempt is not None else "",
        why=decision.waits.get(job.number, record.why),
        progress=record.progress if record.has_ended else _progress(agent, job.run),
        metric=spec.job_options.metric,
        best=spec.job_options.best,
        has_results=bool(record.results),
        results_note=record.results_note,
    )


def _progress(agent: Agent, run: str) -> TrainingProgress | None:
    entry = agent.runs.registry.runs.get(run)
    return training_progress(entry.record, entry.reports) if entry is not None else None


# change


async def _change(agent: Agent, request: ChangeJobsRequest) -> RequestDone:
    registry, me = agent.queue.registry, agent.name
    changes: dict[str, Callable[[JobRecord], JobRecord | None]] = {
        "cancel": lambda record: cancel_job(record, me, at=time.time()),
        "pause": lambda record: pause_job(record, is_paused=True),
        "resume": lambda record: pause_job(record, is_paused=False),
        "clear": clear_job,
    }
    if request.action == "cancel" and not request.jobs:
        raise RunError(
            "no job was named",
            hint="Name jobs: barnraise queue cancel 3 5-8. Or cancel all: barnraise queue cancel --all",
        )
    change = changes[request.action]
    numbers = request.jobs or tuple(
        sorted(
            number
            for number, job in registry.jobs.items()
            if change(job.record) is not None and (request.action != "pause" or job.record.state == "waiting")
        )
    )
    named = [registry.find(number) for number in numbers] if request.jobs else []
    changed = []
    if unsaved := await registry.wait_until_saved(numbers):
        raise MembershipError(
            f"jobs cannot be changed now: {unsaved}",
            hint="Wait until most of the machines are here (`barnraise status`), then try again.",
        )
    for number in [job.number for job in named] or numbers:
        if await _update(agent, number, change):
            changed.append(number)
    if request.action == "cancel" and changed:
        listed = ", ".join(map(str, changed))
        agent.audit.write("run-stopped", subject=f"job {listed}", by=_PERSON, detail="cancelled")
    await _require_saved(agent, changed)
    done = {"cancel": "cancelled", "pause": "paused", "resume": "resumed", "clear": "cleared"}[request.action]
    unchanged = [job for job in named if job.number not in changed]
    return RequestDone(f"{done} {counted(len(changed), 'job')}{_states(unchanged)}")


def _states(unchanged: Sequence[KnownJob]) -> str:
    """Return why these jobs were not changed, as the end of a sentence."""
    states = [
        f"; job {job.number} is {'paused' if _is_waiting_paused(job) else job.record.state}"
        for job in unchanged[:_MOST_STATES]
    ]
    more = len(unchanged) - len(states)
    return "".join(states) + (f"; and {more} more" if more else "")


def _is_waiting_paused(job: KnownJob) -> bool:
    return job.record.is_paused and job.record.state == "waiting"


async def _update(agent: Agent, number: int, change: Callable[[JobRecord], JobRecord | None]) -> bool:
    """Change a record; try again if it changes meanwhile. Return False if there is nothing to change."""
    registry = agent.queue.registry
    for _ in range(_TRIES):
        job = registry.jobs.get(number)
        record = change(job.record) if job is not None else None
        if record is None:
            return False
        try:
            await registry.write(record)
        except RunError:
            continue
        return True
    raise RunError(f"job {number} changes too fast", hint="Try again.")


async def _require_saved(agent: Agent, jobs: list[int]) -> None:
    """Wait until a quorum has changed jobs on disk; raise MembershipError if too few machines answer."""
    if unsaved := await agent.queue.registry.wait_until_saved(jobs):
        raise MembershipError(
            f"{counted(len(jobs), 'job')} changed, but a power cut could undo that: {unsaved}",
            hint="Wait until most of the machines are here (`barnraise status`), then see: barnraise queue",
        )


async def _move(agent: Agent, request: MoveJobRequest) -> RequestDone:
    registry = agent.queue.registry

    def change(_: JobRecord) -> JobRecord | None:
        if request.priority is not None:
            return prioritize_job(registry.jobs, request.job, request.priority)
        return move_job(registry.jobs, request.job, request.before, to_end=request.to_end)

    registry.find(request.job)
    is_changed = await _update(agent, request.job, change)
    await _require_saved(agent, [request.job])
    return RequestDone(
        f"job {request.job} was moved" if is_changed else f"job {request.job} is there already"
    )


async def _results(agent: Agent, number: int) -> ResultsResponse:
    job = agent.queue.registry.find(number)
    record = job.record
    if record.state != "done":
        raise RunError(
            f"job {number} is {record.state}",
            hint=f"The output so far: barnraise logs {job.run}" if job.run else "See: barnraise queue",
        )
    if not record.results:
        return ResultsResponse(b"", record.results_note)
    sources = [NodeId(node) for node in dict.fromkeys((record.results_at, job.spec.by)) if node]
    if not await agent.queue.holds(record.results) and not any(
        node in sources for node in agent.linked_nodes()
    ):
        names = " and ".join(agent.name_of(node) for node in sources)
        return ResultsResponse(b"", f"the results of job {number} are on {names}, which is offline")
    await agent.queue.fetch(record.results, sources, folder_limits(agent.settings))
    return ResultsResponse(record.results, record.results_note)
