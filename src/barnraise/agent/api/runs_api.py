"""API handlers for runs: start, resume, stop, watch, consent and results."""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
import time
from collections.abc import Collection, Mapping, Sequence

import msgspec

from barnraise.agent.api.group_api import group_response, roles_response
from barnraise.agent.audit_trail import order_digest
from barnraise.agent.checkpoints.service import LocatedCheckpoint, ShardedCheckpoint
from barnraise.agent.daemon import Agent
from barnraise.agent.runs.consent import OfferedFolder, describe_offer
from barnraise.agent.runs.messages import MAX_LOG_BYTES
from barnraise.agent.runs.registry import RunEntry
from barnraise.agent_client.cluster_requests import AgentResponse, RequestDone
from barnraise.agent_client.run_options import RunOptions, Variables
from barnraise.agent_client.run_requests import (
    AcceptRunRequest,
    AcceptRunResponse,
    DroppedStepsRequest,
    FailingRequest,
    FailureRow,
    FollowPosition,
    GraphRequest,
    GraphResponse,
    GroupRequest,
    LogChunk,
    PartRow,
    ProgressRequest,
    ResultsRequest,
    ResultsResponse,
    ResumeRunRequest,
    RolesRequest,
    RunRequest,
    RunRow,
    RunsRequest,
    RunsResponse,
    RunStarted,
    StartRunRequest,
    StopRunRequest,
    WatchRequest,
    WatchResponse,
    WorkerRow,
)
from barnraise.artifacts import folder_limits
from barnraise.core.errors import BarnraiseError, MembershipError, RunError
from barnraise.core.names import list_names
from barnraise.environments.compatibility import CompatibilityFinding, describe
from barnraise.identity import NodeId
from barnraise.runs.control.failures import root_failures, summarize
from barnraise.runs.control.lifecycle import environment_findings, mark_provisional, request_stop
from barnraise.runs.control.worker_status import reported_states, training_progress
from barnraise.runs.record import MAX_RESUMED, DroppedSteps, NodeReport, RunRecord, RunSpec, sign_spec
from barnraise.runs.variables import VariableNames, seal
from barnraise.sandbox.choice import find_sandbox, sandbox_sentence
from barnraise.topology.graph import encode_graph

_RESULTS_S = 120.0
_HELD_S = 3.0  # several heartbeats
_POLL_S = 0.1
_MAX_LOG_RESPONSE = 900 << 10  # of one answer
_MAX_LAG = 2 << 20
_LIVE_TAIL = 16 << 10
_PERSON = "this machine's user"  # at the local interface
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"


async def answer(agent: Agent, request: RunRequest) -> AgentResponse:
    """Answer one request about runs of a process of this machine's user."""
    if isinstance(request, RunsRequest | WatchRequest | StopRunRequest | ResumeRunRequest):
        await agent.runs.registry.wait_for_held(_HELD_S)
    match request:
        case StartRunRequest():
            return await _start(agent, request)
        case ResumeRunRequest():
            return await _resume(agent, request)
        case GraphRequest():
            nodes = await _choose_nodes(agent, request.on, RunOptions(wait_s=0.0))
            ids = tuple(node.raw.hex() for node in nodes)
            return GraphResponse(
                graph=encode_graph(agent.link_prober.graph()), nodes=ids, this=agent.me.raw.hex()
            )
        case RunsRequest():
            return RunsResponse(tuple(_row(agent, entry) for entry in agent.runs.registry.runs.values()))
        case WatchRequest():
            return await _watch(agent, request)
        case StopRunRequest():
            return await _stop(agent, request)
        case AcceptRunRequest():
            await asyncio.to_thread(find_sandbox)  # which takes a while the first time
            return _accept(agent, request)
        case GroupRequest():
            return await group_response(agent, request)
        case RolesRequest():
            return roles_response(agent, request)
        case ProgressRequest() | FailingRequest():
            executor = agent.runs.executors.get(agent.runs.registry.find(request.run).run)
            if executor is not None:
                executor.note_request(request)
            return RequestDone("")
        case DroppedStepsRequest():
            agent.runs.report_dropped(
                agent.runs.registry.find(request.run), DroppedSteps(request.steps, request.onward)
            )
            return RequestDone("")
        case ResultsRequest():
            return await _results(agent, agent.runs.registry.find(request.run))
        case _:
            return await agent.runs.checkpoints.answer(request)


def graph_of_run(agent: Agent, run: str) -> GraphResponse:
    """Return the measurements of the machines of one run, for its workers."""
    nodes = tuple(raw.hex() for raw in agent.runs.registry.find(run).spec.nodes)
    graph = agent.link_prober.graph().restricted_to(nodes)
    return GraphResponse(graph=encode_graph(graph), nodes=nodes, this=agent.me.raw.hex())


# start and stop


def _check_owner(agent: Agent) -> None:
    if agent.log.role(agent.me) != "owner":
        raise RunError(
            "guests cannot start runs",
            hint="Start it on a machine that `barnraise nodes` shows as owner.",
        )


def _new_name(title: str) -> str:
    return f"{_slug(title)}-{''.join(secrets.choice(_LETTERS) for _ in range(4))}"


async def _resume(agent: Agent, request: ResumeRunRequest) -> RunStarted:
    _check_owner(agent)
    entry = agent.runs.registry.find(request.run)
    earlier = entry.spec
    if not entry.has_ended:
        raise RunError(f"run {entry.run} has not ended", hint=f"Watch it: barnraise attach {entry.run}")
    _check_variables(entry, request)
    checkpoint = await agent.runs.checkpoints.newest((entry.run, *earlier.resumes))
    if checkpoint is None:
        raise RunError(
            f"no connected machine has a checkpoint of run {entry.run}",
            hint=_without_checkpoint(agent, entry),
        )
    await agent.runs.checkpoints.ensure_files(entry)
    nodes = await _choose_nodes(agent, request.on, earlier.options)
    names = [agent.name_of(node) for node in checkpoint.holders]
    lacking = [agent.name_of(node) for node in checkpoint.holders if node not in nodes]
    if lacking and isinstance(checkpoint, ShardedCheckpoint):
        raise RunError(
            f"shards of the checkpoint are on {' and '.join(lacking)}, which would not take part",
            hint=f"Name all machines: --on {','.join(names)}",
        )
    order = msgspec.structs.replace(
        earlier,
        run=_new_name(earlier.options.title),
        by=agent.me.raw,
        at=time.time(),
        nodes=tuple(node.raw for node in nodes),
        named=bool(request.on),
        resumes=(entry.run, *earlier.resumes)[:MAX_RESUMED],
        device="",
        job=b"",  # an ordinary run, which this machine signs
    )
    started = await _submit(agent, order, f"resumes {entry.run}, from {agent.name}", request.variables)
    source = (
        f"from step {checkpoint.held.step}, which is on"
        if isinstance(checkpoint, LocatedCheckpoint)
        else (f"from its newest whole sharded checkpoint; parts of step {checkpoint.step} are on")
    )
    return msgspec.structs.replace(started, begins=f"{source} {', '.join(names)}")


def _check_variables(entry: RunEntry, request: ResumeRunRequest) -> None:
    """Raise RunError unless the request has all variables that the run was started with."""
    given = dict(request.variables)
    missing = [name for name in entry.spec.variables.names if name not in given]
    if missing:
        options = " ".join(f"--set {name}=VALUE" for name in missing)
        raise RunError(
            f"run {entry.run} was started with --set {' --set '.join(missing)}, and values are not kept",
            hint=f"Give them again: barnraise resume {entry.run} {options}",
        )


async def _submit(agent: Agent, order: RunSpec, why: str, variables: Variables) -> RunStarted:
    values = seal(variables)
    order = msgspec.structs.replace(order, variables=values.names if values else VariableNames())
    agent.runs.variables.keep(order.run, values)
    record = msgspec.structs.replace(sign_spec(order, agent.key), why=why)
    try:
        await agent.runs.controller.write(None, record)
    except BaseException:
        agent.runs.variables.drop(order.run)
        raise
    return RunStarted(order.run, tuple(agent.name_of(NodeId(node)) for node in order.nodes))


async def _start(agent: Agent, request: StartRunRequest) -> RunStarted:
    _check_owner(agent)
    nodes = await _choose_nodes(agent, request.on, request.options)
    order = RunSpec(
        run=_new_name(request.options.title),
        by=agent.me.raw,
        at=time.time(),
        program=request.program,
        options=request.options,
        nodes=tuple(node.raw for node in nodes),
        named=bool(request.on),
    )
    return await _submit(agent, order, f"started from {agent.name}", request.variables)


async def _choose_nodes(agent: Agent, names: Sequence[str], options: RunOptions) -> list[NodeId]:
    """Return the machines that the user named, or all working machines of owners, this one first."""
    if names:
        return list(dict.fromkeys(agent.find(name) for name in names))
    deadline = asyncio.get_running_loop().time() + options.wait_s
    while True:
        present = [member for member in agent.member.view.members if member.works]
        nodes = [NodeId(member.node) for member in present if agent.log.role(NodeId(member.node)) == "owner"]
        if len(nodes) >= options.min_nodes and nodes:
            return sorted(nodes, key=lambda node: node != agent.me)
        if asyncio.get_running_loop().time() > deadline:
            raise RunError(
                f"only {len(nodes)} of the required {options.min_nodes} machines are online after waiting "
                f"{options.wait_s:g} s",
                hint="See which machines are missing: barnraise status",
            )
        await agent.wait_for_change(0.5)


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40] or "run"


async def _stop(agent: Agent, request: StopRunRequest) -> RequestDone:
    if agent.log.role(agent.me) != "owner":
        raise RunError(
            "a guest machine cannot stop other machines' runs",
            hint="`barnraise accept RUN --refuse` leaves it.",
        )
    entry = agent.runs.registry.find(request.run)
    if entry.has_ended:
        return RequestDone(f"run {entry.run} has ended already")
    agent.audit.write(
        "run-stopped", subject=entry.run, by=_PERSON, detail="asked", digest=order_digest(entry.record)
    )
    try:
        await agent.runs.controller.stop(entry, hard=request.hard)
    except MembershipError as error:
        # No quorum: machines that can be reached stop anyway, because a person asked for it.
        record = request_stop(entry.record, agent.name, hard=request.hard)
        if record is not None:
            agent.runs.registry.apply(
                mark_provisional(entry.record, record)
            )  # otherwise no quorum could change it later
            agent.runs.registry.send_record(entry)
        return RequestDone(
            f"run {entry.run} is stopping on the machines that can be reached: {error.message}"
        )
    return RequestDone(f"run {entry.run} is stopping")


# watching


async def _watch(agent: Agent, request: WatchRequest) -> WatchResponse:
    registry = agent.runs.registry
    entry = registry.find(request.run)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + request.wait_s
    chunks = await _read_logs(agent, entry, request)
    while not _has_changed(entry, request, chunks) and loop.time() < deadline:
        await registry.wait_for_change(min(_POLL_S, deadline - loop.time()))
        chunks = await _read_logs(agent, entry, request)
    return WatchResponse(
        # A request for output needs the space for that.
        row=_row(agent, entry, with_tails=not request.follow),
        parts=_parts(agent, entry),
        workers=_workers(agent, entry),
        findings=_findings(agent, entry),
        notes=tuple(
            dropped.sentence(agent.name_of(NodeId(node)))
            for node, report in entry.reports.items()
            for dropped in report.dropped
        ),
        heard=chunks,
        past=_past_workers(agent, entry),
    )


def _has_changed(entry: RunEntry, request: WatchRequest, chunks: tuple[LogChunk, ...]) -> bool:
    return entry.record.version != request.version or entry.has_ended or any(chunk.data for chunk in chunks)


async def _read_logs(agent: Agent, entry: RunEntry, request: WatchRequest) -> tuple[LogChunk, ...]:
    if not request.follow:
        return ()
    max_bytes = min(MAX_LOG_BYTES, _MAX_LOG_RESPONSE // len(request.follow))
    reads = (_read_log(agent, entry, position, max_bytes, live=request.live) for position in request.follow)
    return tuple(await asyncio.gather(*reads))


async def _read_log(
    agent: Agent, entry: RunEntry, position: FollowPosition, max_bytes: int, *, live: bool
) -> LogChunk:
    offset = position.offset
    try:
        output = await agent.runs.read_output(entry, position.worker, offset, max_bytes)
        if live and output.end - offset > _MAX_LAG:
            offset = output.end - _LIVE_TAIL
            output = await agent.runs.read_output(entry, position.worker, offset, max_bytes)
    except BarnraiseError:  # its machine is offline, and its output with it
        return LogChunk(position.worker, position.offset, b"", True, missing=True)
    is_complete = output.start + len(output.data) >= output.end
    return LogChunk(position.worker, output.start, output.data, is_complete)


def _row(agent: Agent, entry: RunEntry, *, with_tails: bool = False) -> RunRow:
    record, order = entry.record, entry.spec

    def name(node: bytes) -> str:
        return agent.name_of(NodeId(node))

    outcome = record.outcome
    return RunRow(
        run=order.run,
        title=order.options.title,
        command=order.program.command,
        by=name(order.by),
        at=order.at,
        phase=record.phase,
        generation=record.generation,
        version=record.version,
        sentence=outcome.sentence if outcome is not None else record.why,
        machines=tuple(map(name, _machines_of(record, order))),
        left_out=tuple(
            (name(excluded.node), excluded.why) for excluded in (*record.left_out, *record.paused)
        ),
        restarts=record.restarts,
        code=outcome.code if outcome is not None and record.phase == "ended" else None,
        failed_rank=outcome.rank if outcome is not None and outcome.rank >= 0 else None,
        failed_on=name(outcome.node) if outcome is not None and outcome.node else "",
        tail=outcome.tail if outcome is not None else "",
        failures=_failures(agent, record, with_tails=with_tails),
        progress=training_progress(record, entry.reports),
        changes=record.changes,
    )


def _without_checkpoint(agent: Agent, entry: RunEntry) -> str:
    """Return what to do about a run whose checkpoint no machine that is here has."""
    here = {agent.name_of(NodeId(member.node)) for member in agent.member.view.members}
    absent = [name for name in _row(agent, entry).machines if name not in here]
    if absent:
        return f"Switch on {list_names(absent)}, where it may have saved one; or start again: barnraise run"
    return "It ended before its first checkpoint: start again with barnraise run."


def _machines_of(record: RunRecord, order: RunSpec) -> Sequence[bytes]:
    """Return the machines of the group; after the end all that took part, as some finish before others."""
    if record.phase != "ended":
        return record.nodes or order.nodes
    return [node for node in order.nodes if record.may_join(node)] or order.nodes


def _failures(agent: Agent, record: RunRecord, *, with_tails: bool) -> tuple[FailureRow, ...]:
    has_succeeded = record.outcome is not None and record.outcome.code == 0
    roots = {failure.key for failure in root_failures(record.failures, has_succeeded=has_succeeded)}
    return tuple(
        FailureRow(
            machine=agent.name_of(NodeId(item.node)),
            rank=item.failure.rank,
            summary=summarize(item.failure),
            tail=item.failure.tail if with_tails else "",
            signal=item.failure.signal,
            follows=item.key not in roots,
        )
        for item in record.failures
    )


def _parts(agent: Agent, entry: RunEntry) -> tuple[PartRow, ...]:
    return tuple(_part(agent, node, entry.reports.get(node)) for node in entry.spec.nodes)


def _part(agent: Agent, node: bytes, report: NodeReport | None) -> PartRow:
    name = agent.name_of(NodeId(node))
    if report is None:
        is_online = node in agent.member.view.nodes
        words = "it has not answered yet" if is_online else "it is offline"
        return PartRow(name=name, stage="waiting", words=words)
    if report.paused:
        return PartRow(name=name, stage="waiting", words=f"it is paused: {report.paused}")
    return PartRow(
        name=name,
        stage=report.stage,
        words=report.words,
        done_bytes=report.done_bytes,
        all_bytes=report.all_bytes,
    )


def _past_workers(agent: Agent, entry: RunEntry) -> tuple[WorkerRow, ...]:
    """Return the workers that took part earlier, and whose output can still be read."""
    record = entry.record
    current = {slot.key for slot in record.slots}
    states = reported_states(entry.reports)
    return tuple(
        WorkerRow(
            rank=-1,
            name=agent.name_of(NodeId(slot.node)),
            device=slot.device,
            state="ended",
            local_rank=slot.local_rank,
            start=slot.start,
            number=number,
            main_offset=states[slot.key].main_offset if slot.key in states else -1,
            is_trusted=_is_trusted(agent, slot.node),
        )
        for number, slot in enumerate(record.workers)
        if slot.key not in current
    )


def _workers(agent: Agent, entry: RunEntry) -> tuple[WorkerRow, ...]:
    record = entry.record
    states = reported_states(entry.reports)
    numbers = {slot.key: number for number, slot in enumerate(record.workers)}
    rows = []
    for rank, slot in enumerate(record.slots):
        state = states.get(slot.key)
        ended = state is not None and state.state == "ended"
        report = entry.reports.get(slot.node)
        rows.append(
            WorkerRow(
                rank=rank,
                name=agent.name_of(NodeId(slot.node)),
                device=slot.device,
                local_rank=slot.local_rank,
                start=slot.start,
                state=state.state if state is not None else "starting",
                code=state.code if state is not None and ended else None,
                signal=state.signal or None if state is not None and ended else None,
                words=state.wait_reason if state is not None and not ended else "",
                number=numbers.get(slot.key, 0),
                main_offset=state.main_offset if state is not None else -1,
                has_session=report is not None and report.elastic,
                is_trusted=_is_trusted(agent, slot.node),
            )
        )
    return tuple(rows)


def _is_trusted(agent: Agent, node: bytes) -> bool:
    """Tell whether output of a machine's workers reaches this machine's terminal unchanged."""
    return agent.log.role(agent.me) == "owner" and agent.log.role(NodeId(node)) == "owner"


def _findings(agent: Agent, entry: RunEntry) -> tuple[str, ...]:
    findings = environment_findings(entry.spec, entry.reports, lambda raw: agent.name_of(NodeId(raw)))
    left_out = {agent.name_of(NodeId(excluded.node)) for excluded in entry.record.left_out}
    return _shown_findings(findings, left_out)


def _shown_findings(findings: Sequence[CompatibilityFinding], left_out: Collection[str]) -> tuple[str, ...]:
    """Return the lines about the machines that take part; those left out are shown with their reason."""
    shown = [finding for finding in findings if finding.node not in left_out]
    return tuple(describe(shown)) if any(finding.level != "fine" for finding in shown) else ()


# consent and results


def _accept(agent: Agent, request: AcceptRunRequest) -> AcceptRunResponse:
    entry = agent.runs.registry.find(request.run)
    spec, executor = entry.spec, agent.runs.executors.get(entry.run)
    preparation = executor.preparation if executor is not None else None
    consent = preparation.consent if preparation is not None else None
    if preparation is None or preparation.offered is None or consent is None or consent.done():
        sentence = f"run {entry.run} does not wait for consent on this machine"
        return _offer(agent, entry, OfferedFolder(), {}, sentence=sentence, accepted=True)
    if request.order and request.order != order_digest(entry.record):
        raise RunError(
            f"run {entry.run} is not the run that was shown",
            hint=f"Look at it again: barnraise accept {entry.run}",
        )
    if request.no or request.yes:
        preparation.sandbox_wanted = request.sandbox
        consent.set_result(not request.no)
        agent.audit.write(
            "consent-refused" if request.no else "consent-given",
            subject=entry.run,
            by=_PERSON,
            detail=f"asked by {agent.name_of(NodeId(spec.by))}: {shlex.join(spec.program.command)}",
            digest=order_digest(entry.record),
        )
    result = "refused" if request.no else "accepted" if request.yes else "waiting for your decision"
    sentence = f"run {entry.run}: {result}"
    offer = _offer(
        agent,
        entry,
        preparation.offered,
        preparation.values,
        sentence=sentence,
        accepted=request.yes,
    )
    if spec.options.container:
        return offer  # the line of the image says what confines it
    return msgspec.structs.replace(offer, sandbox=sandbox_sentence(is_wanted=request.sandbox))


def _offer(
    agent: Agent,
    entry: RunEntry,
    folder: OfferedFolder,
    values: Mapping[str, str],
    *,
    sentence: str,
    accepted: bool,
) -> AcceptRunResponse:
    others = [node for node in agent.log.members if node != agent.me]
    return msgspec.structs.replace(
        describe_offer(entry.record, entry.spec, folder, values),
        by=agent.name_of(NodeId(entry.spec.by)),
        role=agent.log.role(agent.me) or "",
        machines=tuple(f"{agent.name_of(node)} ({node.short})" for node in others),
        sentence=sentence,
        accepted=accepted,
    )


async def _results(agent: Agent, entry: RunEntry) -> ResultsResponse:
    record = entry.record
    if not record.slots:
        return ResultsResponse(b"", "")
    node = record.results_at or record.slots[0].node
    name = agent.name_of(NodeId(node))
    deadline = asyncio.get_running_loop().time() + _RESULTS_S
    while True:
        report = entry.reports.get(node)
        if report is not None and report.collected:
            break
        is_online = node in agent.member.view.nodes
        if not is_online or asyncio.get_running_loop().time() > deadline:
            return ResultsResponse(b"", f"the results of rank 0 are on {name}, which is offline")
        await agent.runs.registry.wait_for_change(0.5)
    if not report.results:
        return ResultsResponse(b"", report.words)
    if node != agent.me.raw:
        limits = folder_limits(agent.settings)
        await agent.runs.artifacts.fetch(report.results, [NodeId(node)], [agent.me], limits, lambda _: None)
    return ResultsResponse(report.results, report.words)
