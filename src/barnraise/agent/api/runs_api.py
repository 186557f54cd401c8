"""Answers the command line's questions about runs."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Sequence

import msgspec

from barnraise.agent.api.group_api import circle_told
from barnraise.agent.checkpoints.service import LocatedCheckpoint, ShardedCheckpoint
from barnraise.agent.daemon import Agent
from barnraise.agent.runs.messages import MOST_LOG_BYTES
from barnraise.agent.runs.registry import RunEntry
from barnraise.agent_client.cluster_requests import RequestDone, Told
from barnraise.agent_client.run_requests import (
    AcceptRunRequest,
    AcceptRunResponse,
    DroppedStepsRequest,
    FollowPosition,
    GraphRequest,
    GraphResponse,
    GroupRequest,
    LogChunk,
    PartRow,
    ResultsRequest,
    ResultsResponse,
    ResumeRunRequest,
    RunQuestion,
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
from barnraise.environments.compatibility import describe
from barnraise.environments.script_imports import ScriptImports
from barnraise.identity import NodeId
from barnraise.runs.control.lifecycle import environment_findings, mark_provisional, request_stop
from barnraise.runs.control.worker_status import reported_states
from barnraise.runs.record import DataSet, DroppedSteps, NodeReport, RunSpec, sign_spec
from barnraise.topology.graph import encode_graph

_RESULTS_S = 120.0
_LOOK_S = 0.1
_MOST_HEARD = 900 << 10  # of one answer
_FAR_BEHIND = 2 << 20
_LAST_BYTES = 16 << 10
_MOST_RESUMED = 16
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"


async def answer(agent: Agent, question: RunQuestion) -> Told:
    """Of a process of this machine's user."""
    match question:
        case StartRunRequest():
            return await _start(agent, question)
        case ResumeRunRequest():
            return await _resume(agent, question)
        case GraphRequest():
            nodes = await _chosen(agent, question.on, 1, 0.0)
            ids = tuple(node.raw.hex() for node in nodes)
            return GraphResponse(
                graph=encode_graph(agent.surveyor.graph()), nodes=ids, this=agent.me.raw.hex()
            )
        case RunsRequest():
            return RunsResponse(tuple(_row(agent, known) for known in agent.runs.book.runs.values()))
        case WatchRequest():
            return await _watch(agent, question)
        case StopRunRequest():
            return await _stop(agent, question)
        case AcceptRunRequest():
            return _accept(agent, question)
        case GroupRequest():
            return await circle_told(agent, question)
        case DroppedStepsRequest():
            agent.runs.dropped(
                agent.runs.book.find(question.run), DroppedSteps(question.steps, question.onward)
            )
            return RequestDone("")
        case ResultsRequest():
            return await _results(agent, agent.runs.book.find(question.run))
        case _:
            return await agent.runs.checkpoints.answer(question)


# start and stop


def _check_owner(agent: Agent) -> None:
    if agent.log.role(agent.me) != "owner":
        raise RunError(
            "this machine is a guest of its cluster and starts no run",
            hint="Start it on a machine that `barnraise nodes` shows as owner.",
        )


def _new_name(title: str) -> str:
    return f"{_plain(title)}-{''.join(secrets.choice(_LETTERS) for _ in range(4))}"


async def _resume(agent: Agent, asked: ResumeRunRequest) -> RunStarted:
    _check_owner(agent)
    known = agent.runs.book.find(asked.run)
    old = known.order
    if not known.has_ended:
        raise RunError(f"run {known.run} has not ended", hint=f"Watch it: barnraise attach {known.run}")
    found = await agent.runs.checkpoints.newest((known.run, *old.resumes))
    if found is None:
        raise RunError(
            f"no machine that is here has a checkpoint of run {known.run}",
            hint=f"Switch on those that saved, such as {', '.join(_row(agent, known).machines)}; or begin "
            "anew: barnraise run",
        )
    await agent.runs.checkpoints.bring_files(known)
    nodes = await _chosen(agent, asked.on, old.min_nodes, old.wait_s)
    names = [agent.name_of(node) for node in found.holders]
    lacking = [agent.name_of(node) for node in found.holders if node not in nodes]
    if lacking and isinstance(found, ShardedCheckpoint):
        raise RunError(
            f"{' and '.join(lacking)} would take no part, and parts of the sharded checkpoint are there",
            hint=f"Name all: --on {','.join(names)}",
        )
    order = msgspec.structs.replace(
        old,
        run=_new_name(old.title),
        by=agent.me.raw,
        at=time.time(),
        nodes=tuple(node.raw for node in nodes),
        named=bool(asked.on),
        resumes=(known.run, *old.resumes)[:_MOST_RESUMED],
    )
    started = await _order(agent, order, f"goes on with {known.run}, from {agent.name}")
    words = (
        f"from step {found.held.step}, which is on"
        if isinstance(found, LocatedCheckpoint)
        else (f"from its newest whole sharded checkpoint; parts of step {found.step} are on")
    )
    return msgspec.structs.replace(started, begins=f"{words} {', '.join(names)}")


async def _order(agent: Agent, order: RunSpec, why: str) -> RunStarted:
    record = msgspec.structs.replace(sign_spec(order, agent.key), why=why)
    await agent.runs.keeper.write(None, record)
    return RunStarted(order.run, tuple(agent.name_of(NodeId(node)) for node in order.nodes))


async def _start(agent: Agent, asked: StartRunRequest) -> RunStarted:
    _check_owner(agent)
    nodes = await _chosen(agent, asked.on, asked.min_nodes, asked.wait_s)
    order = RunSpec(
        run=_new_name(asked.title),
        by=agent.me.raw,
        at=time.time(),
        command=asked.command,
        folder=asked.folder,
        title=asked.title[:200],
        nodes=tuple(node.raw for node in nodes),
        named=bool(asked.on),
        per_node=asked.per_node,
        min_nodes=asked.min_nodes,
        wait_s=asked.wait_s,
        restarts=asked.restarts,
        environment=asked.environment,
        engine=asked.engine,
        fabric=asked.fabric,
        quiet=asked.quiet,
        nice=asked.nice,
        memory_bytes=asked.memory_bytes,
        container=asked.container,
        data=tuple(DataSet(data.name, data.manifest, data.path) for data in asked.data),
        variables=asked.variables,
        needs=msgspec.msgpack.decode(asked.needs, type=ScriptImports) if asked.needs else ScriptImports(),
    )
    return await _order(agent, order, f"started from {agent.name}")


async def _chosen(agent: Agent, on: Sequence[str], least: int, wait_s: float) -> list[NodeId]:
    """The machines that the user named, or every owner's machine that works; this one first."""
    if on:
        return list(dict.fromkeys(agent.find(name) for name in on))
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        present = [one for one in agent.member.view.members if one.works]
        nodes = [NodeId(one.node) for one in present if agent.log.role(NodeId(one.node)) == "owner"]
        if len(nodes) >= least and nodes:
            return sorted(nodes, key=lambda node: node != agent.me)
        if asyncio.get_running_loop().time() > deadline:
            raise RunError(
                f"{len(nodes)} of at least {least} machines are here after {wait_s:g} s",
                hint="See who is missing: barnraise status",
            )
        await agent.news_within(0.5)


def _plain(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40] or "run"


async def _stop(agent: Agent, asked: StopRunRequest) -> RequestDone:
    if agent.log.role(agent.me) != "owner":
        raise RunError("a guest stops no run of others", hint="`barnraise accept RUN --refuse` leaves it.")
    known = agent.runs.book.find(asked.run)
    if known.has_ended:
        return RequestDone(f"run {known.run} has ended already")
    try:
        await agent.runs.keeper.stop(known, hard=asked.hard)
    except MembershipError as error:
        # Nobody can decide now; who can be reached stops all the same, for the person said so.
        record = request_stop(known.record, agent.name, hard=asked.hard)
        if record is not None:
            agent.runs.book.take(mark_provisional(known.record, record))  # or nobody could change it any more
            agent.runs.book.tell_record(known)
        return RequestDone(f"run {known.run} stops on the machines that can be reached: {error.message}")
    return RequestDone(f"run {known.run} stops")


# watching


async def _watch(agent: Agent, asked: WatchRequest) -> WatchResponse:
    book = agent.runs.book
    known = book.find(asked.run)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + asked.wait_s
    heard = await _hear(agent, known, asked)
    while not _is_news(known, asked, heard) and loop.time() < deadline:
        await book.news_within(min(_LOOK_S, deadline - loop.time()))
        heard = await _hear(agent, known, asked)
    return WatchResponse(
        row=_row(agent, known),
        parts=_parts(agent, known),
        workers=_workers(agent, known),
        findings=_findings(agent, known),
        notes=tuple(
            one.sentence(agent.name_of(NodeId(node)))
            for node, report in known.reports.items()
            for one in report.dropped
        ),
        heard=heard,
    )


def _is_news(known: RunEntry, asked: WatchRequest, heard: tuple[LogChunk, ...]) -> bool:
    return known.record.version != asked.version or known.has_ended or any(part.data for part in heard)


async def _hear(agent: Agent, known: RunEntry, asked: WatchRequest) -> tuple[LogChunk, ...]:
    if not asked.follow:
        return ()
    most = min(MOST_LOG_BYTES, _MOST_HEARD // len(asked.follow))
    hearing = (_hear_one(agent, known, one, most, live=asked.live) for one in asked.follow)
    return tuple(await asyncio.gather(*hearing))


async def _hear_one(
    agent: Agent, known: RunEntry, wanted: FollowPosition, most: int, *, live: bool
) -> LogChunk:
    offset = wanted.offset
    try:
        told = await agent.runs.output(known, wanted.generation, wanted.rank, offset, most)
        if live and told.end - offset > _FAR_BEHIND:
            offset = told.end - _LAST_BYTES
            told = await agent.runs.output(known, wanted.generation, wanted.rank, offset, most)
    except BarnraiseError:  # its machine is gone; what it said is gone with it for now
        return LogChunk(wanted.rank, wanted.generation, wanted.offset, b"", True)
    whole = told.start + len(told.data) >= told.end
    return LogChunk(wanted.rank, wanted.generation, told.start, told.data, whole)


def _row(agent: Agent, known: RunEntry) -> RunRow:
    record, order = known.record, known.order

    def name(node: bytes) -> str:
        return agent.name_of(NodeId(node))

    outcome = record.outcome
    return RunRow(
        run=order.run,
        title=order.title,
        command=order.command,
        by=name(order.by),
        at=order.at,
        phase=record.phase,
        generation=record.generation,
        version=record.version,
        sentence=outcome.sentence if outcome is not None else record.why,
        machines=tuple(map(name, record.nodes or order.nodes)),
        left_out=tuple((name(one.node), one.why) for one in (*record.left_out, *record.paused)),
        restarts=record.restarts,
        code=outcome.code if outcome is not None and record.phase == "ended" else None,
        failed_rank=outcome.rank if outcome is not None and outcome.rank >= 0 else None,
        failed_on=name(outcome.node) if outcome is not None and outcome.node else "",
        tail=outcome.tail if outcome is not None else "",
    )


def _parts(agent: Agent, known: RunEntry) -> tuple[PartRow, ...]:
    return tuple(_part(agent, node, known.reports.get(node)) for node in known.order.nodes)


def _part(agent: Agent, node: bytes, report: NodeReport | None) -> PartRow:
    name = agent.name_of(NodeId(node))
    if report is None:
        here = node in agent.member.view.nodes
        words = "it has not answered yet" if here else "it is not here"
        return PartRow(name=name, stage="waiting", words=words)
    return PartRow(
        name=name,
        stage=report.stage,
        words=report.words,
        done_bytes=report.done_bytes,
        all_bytes=report.all_bytes,
    )


def _workers(agent: Agent, known: RunEntry) -> tuple[WorkerRow, ...]:
    record = known.record
    states = reported_states(known.reports)
    rows = []
    for rank, slot in enumerate(record.slots):
        state = states.get(slot.key)
        ended = state is not None and state.state == "ended"
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
            )
        )
    return tuple(rows)


def _findings(agent: Agent, known: RunEntry) -> tuple[str, ...]:
    found = environment_findings(known.order, known.reports, lambda raw: agent.name_of(NodeId(raw)))
    return tuple(describe(found)) if any(one.level != "fine" for one in found) else ()


# consent and results


def _accept(agent: Agent, asked: AcceptRunRequest) -> AcceptRunResponse:
    known = agent.runs.book.find(asked.run)
    order = known.order
    part = agent.runs.parts.get(known.run)
    waiting = part is not None and part.consent is not None and not part.consent.done()
    by = agent.name_of(NodeId(order.by))
    if not waiting:
        return AcceptRunResponse(
            sentence=f"run {known.run} does not ask for anything here",
            by=by,
            command=order.command,
            files=(),
            bytes=0,
            accepted=True,
        )
    assert part is not None
    assert part.consent is not None
    assert part.manifest is not None
    if asked.no:
        part.consent.set_result(False)
    elif asked.yes:
        part.consent.set_result(True)
    names = tuple(entry.path for entry in part.manifest.files)
    words = {True: "it begins here", False: "it was refused", None: "it waits for your word"}
    said = True if asked.yes else False if asked.no else None
    return AcceptRunResponse(
        sentence=f"run {known.run}: {words[said]}",
        by=by,
        command=order.command,
        files=names[:5000],
        bytes=part.manifest.size,
        accepted=asked.yes,
    )


async def _results(agent: Agent, known: RunEntry) -> ResultsResponse:
    record = known.record
    if not record.slots:
        return ResultsResponse(b"", "")
    node = record.results_at or record.slots[0].node
    name = agent.name_of(NodeId(node))
    deadline = asyncio.get_running_loop().time() + _RESULTS_S
    while True:
        report = known.reports.get(node)
        if report is not None and report.collected:
            break
        here = node in agent.member.view.nodes
        if not here or asyncio.get_running_loop().time() > deadline:
            return ResultsResponse(b"", f"what rank 0 wrote is on {name}, which is not here now")
        await agent.runs.book.news_within(0.5)
    if not report.results:
        return ResultsResponse(b"", report.words)
    if node != agent.me.raw:
        limits = folder_limits(agent.settings)
        await agent.runs.shipper.fetch(report.results, [NodeId(node)], [agent.me], limits, lambda _: None)
    return ResultsResponse(report.results, "")
