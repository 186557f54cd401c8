"""API handlers for the records of runs."""

from __future__ import annotations

from barnraise.agent.daemon import Agent
from barnraise.agent_client.cluster_requests import AgentResponse, RequestDone
from barnraise.agent_client.history.requests import (
    HistoryListRequest,
    HistoryPartRequest,
    HistoryRemoveRequest,
    HistoryRequest,
    RecordRequest,
)


async def answer(agent: Agent, request: HistoryRequest) -> AgentResponse:
    """Answer one request about records of a process of this machine's user."""
    history = agent.runs.history
    match request:
        case RecordRequest():
            await history.receive(request)
            return RequestDone("")
        case HistoryRemoveRequest():
            await history.remove(request)
            return RequestDone("")
        case HistoryListRequest():
            return await history.list(request)
        case HistoryPartRequest():
            return await history.read(request)
