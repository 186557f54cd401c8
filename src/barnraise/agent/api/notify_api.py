"""API handlers for notifications: the targets of this machine's user."""

from __future__ import annotations

from barnraise.agent.daemon import Agent
from barnraise.agent_client.notifications.requests import (
    AddTargetRequest,
    ListTargetsRequest,
    NotificationAnswer,
    NotificationRequest,
    RemoveTargetRequest,
    TargetsResponse,
    TargetTestRequest,
    TargetTestResponse,
)
from barnraise.agent_client.notifications.targets import is_unencrypted
from barnraise.core.errors import AgentError

_CLEAR = "This address has no TLS: others in the network can read the notices, and a token."


async def answer(agent: Agent, request: NotificationRequest) -> NotificationAnswer:
    """Answer one request about notifications of a process of this machine's user."""
    service = agent.notifications
    match request:
        case AddTargetRequest():
            if agent.log.role(agent.me) != "owner":
                raise AgentError(
                    "this machine is a guest: it starts no runs, so it has no notices to send",
                    hint="Do it on the machine that starts the runs.",
                )
            name = service.add(request.target, request.events)
            rows = tuple(row for row in service.table() if row.name == name)
            return TargetsResponse(rows, _CLEAR if is_unencrypted(request.target) else "")
        case ListTargetsRequest():
            return TargetsResponse(service.table(), service.problem)
        case RemoveTargetRequest():
            service.remove(request.name)
            return TargetsResponse(service.table())
        case TargetTestRequest():
            return TargetTestResponse(await service.test(request.name))
