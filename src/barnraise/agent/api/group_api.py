"""Tells the workers of a session in which group they are, and why in none."""

from __future__ import annotations

import asyncio

from barnraise.agent.daemon import Agent
from barnraise.agent.runs.registry import RunEntry
from barnraise.agent_client.run_requests import GroupRequest, GroupResponse
from barnraise.identity import NodeId
from barnraise.runs.control.eviction import unreachable_peer
from barnraise.runs.control.pausing import pause_reason


async def circle_told(agent: Agent, asked: GroupRequest) -> GroupResponse:
    known = agent.runs.book.find(asked.run)
    part = agent.runs.parts.get(known.run)
    if part is not None:
        part.hear(asked)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + asked.wait_s
    while known.record.version == asked.version and loop.time() < deadline:
        await agent.runs.book.news_within(deadline - loop.time())
    record = known.record
    rank = part.in_session(asked) if part is not None else None
    nursed = [slot.key for slot in record.joining]
    key = (agent.me.raw, asked.local_rank, asked.start)
    place = nursed.index(key) if key in nursed else None
    return GroupResponse(
        version=record.version,
        generation=record.generation,
        is_member=rank is not None and record.phase == "running",
        rank=rank if rank is not None else place or 0,
        world=len(record.slots),
        provisional=bool(record.provisional),
        # One that was started for the run and has no state yet proves that nobody had any.
        beginning=any(slot.start == record.first_generation for slot in record.slots),
        finished=record.finished,
        broken=any(
            not known.leaves(slot)
            for slot in known.slots.get(asked.generation, ())
            if slot not in record.slots
        ),
        nursery=record.recovery_attempt if record.joining and (rank is not None or place is not None) else 0,
        nursed=len(nursed),
        sentence=_waits_for(agent, known) if rank is None else record.why,
    )


def _waits_for(agent: Agent, known: RunEntry) -> str:
    """Why a worker of this machine has not been let in."""
    if why := pause_reason(known.record, agent.me.raw):
        return f"this machine rests, because {why}"
    other = unreachable_peer(agent.me.raw, known.record.nodes, agent.runs.keeper.apart())
    if other is None:
        return "the others have not let this worker in yet"
    return f"this machine and {agent.name_of(NodeId(other))} cannot reach each other"
