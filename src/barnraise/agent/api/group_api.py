"""API handlers that tell a worker which process group it belongs to, and which machines are guests'."""

from __future__ import annotations

import asyncio

from barnraise.agent.daemon import Agent
from barnraise.agent.runs.registry import RunEntry
from barnraise.agent_client.run_requests import GroupRequest, GroupResponse, RolesRequest, RolesResponse
from barnraise.identity import NodeId
from barnraise.runs.control.eviction import unreachable_peer
from barnraise.runs.control.pausing import pause_reason
from barnraise.runs.participants import roles


async def group_response(agent: Agent, request: GroupRequest) -> GroupResponse:
    """Return the worker's current group; wait up to ``wait_s`` for a change of the run record."""
    entry = agent.runs.registry.find(request.run)
    executor = agent.runs.executors.get(entry.run)
    if executor is not None:
        executor.note_request(request)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + request.wait_s
    while entry.record.version == request.version and loop.time() < deadline:
        await agent.runs.registry.wait_for_change(deadline - loop.time())
    record = entry.record
    rank = executor.rank_of(request) if executor is not None else None
    joining = [slot.key for slot in record.joining]
    key = (agent.me.raw, request.local_rank, request.start)
    joining_rank = joining.index(key) if key in joining else None
    return GroupResponse(
        version=record.version,
        generation=record.generation,
        is_member=rank is not None and record.phase == "running",
        rank=rank if rank is not None else joining_rank or 0,
        world=len(record.slots),
        provisional=bool(record.provisional),
        # A worker of the first start without state proves that no worker had any.
        beginning=any(slot.start == record.first_generation for slot in record.slots),
        finished=record.finished,
        broken=any(
            not entry.is_leaving(slot)
            for slot in entry.slots.get(request.generation, ())
            if slot not in record.slots
        ),
        recovery_attempt=record.recovery_attempt
        if record.joining and (rank is not None or joining_rank is not None)
        else 0,
        joining=len(joining),
        names=tuple(agent.name_of(NodeId(slot.node)) for slot in record.slots),
        sentence=_waits_for(agent, entry) if rank is None else record.why,
    )


def roles_response(agent: Agent, request: RolesRequest) -> RolesResponse:
    """Return the owners and guests of the cluster, and which guests the spec of the run names.

    In a run that is not known here no guest is trusted.
    """
    entry = agent.runs.registry.runs.get(request.run)
    return roles(agent.log, agent.me, entry.spec if entry is not None else None, agent.name_of)


def _waits_for(agent: Agent, entry: RunEntry) -> str:
    """Return the reason why the group has not admitted the workers of this machine."""
    if reason := pause_reason(entry.record, agent.me.raw):
        return f"this machine is paused: {reason}"
    other = unreachable_peer(agent.me.raw, entry.record.nodes, agent.runs.controller.partitioned())
    if other is None:
        return "waiting for the group to admit this worker"
    return f"this machine and {agent.name_of(NodeId(other))} cannot reach each other"
