"""Requests of one owner's machine to the agent of another: what they may be, and how they are answered.

Both machines must be owners. A guest's machine belongs to another person: owners do not ask it, and it asks
none of them.
"""

from __future__ import annotations

import asyncio

from barnraise.agent.context import AnsweringContext
from barnraise.agent.page.messages import MAX_RESPONSE, OwnerMessage, OwnerRequest, OwnerResponse, encode
from barnraise.agent_client.cluster_requests import (
    AgentRequest,
    AgentResponse,
    AnyAgentRequest,
    CheckRequest,
    StatusRequest,
    decode_request,
    decode_response,
)
from barnraise.agent_client.cluster_requests import encode as encode_request
from barnraise.agent_client.history.requests import HistoryListRequest, HistoryPartRequest, HistoryRequest
from barnraise.agent_client.run_requests import RunRequest, RunsRequest, StopRunRequest, WatchRequest
from barnraise.core import errors
from barnraise.core.errors import AgentError, BarnraiseError, ProtocolError, TransportError
from barnraise.identity import NodeId

_ANSWER_S = 20.0
_MOST_AT_ONCE = 8  # requests of one machine
_ALLOWED = (
    *(StatusRequest, RunsRequest, WatchRequest, StopRunRequest, CheckRequest),
    *(HistoryListRequest, HistoryPartRequest),
)


def refuse_owner_request(request: AnyAgentRequest) -> str | None:
    """Return why another owner's machine may not send this request, or None if it may."""
    if isinstance(request, _ALLOWED):
        return None
    return f"{type(request).__name__} is for commands on the machine itself"


class OwnerRequests:
    """Requests to other owners' agents and the responses to theirs."""

    def __init__(self, context: AnsweringContext) -> None:
        self._context = context
        self._serial = 0
        self._waiting: dict[tuple[NodeId, int], asyncio.Future[OwnerResponse]] = {}
        self._answering: dict[NodeId, int] = {}

    async def ask(self, node: NodeId, request: AgentRequest | RunRequest | HistoryRequest) -> AgentResponse:
        """Return the response of another owner's agent; raise its error, or TransportError without one."""
        name = self._context.name_of(node)
        if self._context.log.role(self._context.me) != "owner" or self._context.log.role(node) != "owner":
            raise AgentError(
                f"{name} is not asked: only owners' machines ask each other",
                hint="See the roles: barnraise nodes",
            )
        if node not in self._context.linked_nodes():
            raise TransportError(f"{name} is not connected to this machine")
        self._serial += 1
        future: asyncio.Future[OwnerResponse] = asyncio.get_running_loop().create_future()
        key = node, self._serial
        self._waiting[key] = future
        try:
            self._context.send_bulk(node, encode(OwnerRequest(self._serial, encode_request(request))))
            response = await asyncio.wait_for(future, _ANSWER_S)
        except TimeoutError as error:
            raise TransportError(f"{name} did not answer within {_ANSWER_S:g} s") from error
        finally:
            del self._waiting[key]
        if response.code:
            raise errors.by_code(response.code, AgentError)(response.message, hint=response.hint)
        return decode_response(response.body)

    def received(self, node: NodeId, message: OwnerMessage) -> None:
        """Handle a message of another agent; raise ProtocolError if it is not of an owner."""
        if self._context.log.role(node) != "owner":
            raise ProtocolError(f"{node.short} is a guest and cannot ask this agent")
        if isinstance(message, OwnerRequest):
            if self._answering.get(node, 0) >= _MOST_AT_ONCE:
                self._send(node, OwnerResponse(message.serial, code="agent", message="too many requests"))
                return
            self._answering[node] = self._answering.get(node, 0) + 1
            self._context.spawn(self._answer(node, message))
            return
        future = self._waiting.get((node, message.serial))
        if future is not None and not future.done():
            future.set_result(message)

    async def _answer(self, node: NodeId, request: OwnerRequest) -> None:
        try:
            self._send(node, OwnerResponse(request.serial, await self._response(node, request.body)))
        except BarnraiseError as error:
            message, hint = error.message[:4000], error.hint[:4000]
            self._send(node, OwnerResponse(request.serial, code=error.code, message=message, hint=hint))
        finally:
            self._answering[node] -= 1

    async def _response(self, node: NodeId, body: bytes) -> bytes:
        reason = refuse_owner_request(request := decode_request(body))
        if reason is None and self._context.log.role(self._context.me) != "owner":
            reason = "this machine is a guest, and only its user asks its agent"
        if reason is not None:
            raise AgentError(f"the agent rejects a request of {self._context.name_of(node)}: {reason}")
        if isinstance(request, StopRunRequest):
            what = f"{type(request).__name__} over its link"
            self._context.audit.write("asked-by-owner", by=self._context.name_of(node), detail=what)
        response = await self._context.answer(body, "")
        if len(response) > MAX_RESPONSE:
            raise AgentError(
                f"the response has {len(response)} bytes, and at most {MAX_RESPONSE} travel",
                hint="Open the page on the machine itself: barnraise open",
            )
        return response

    def _send(self, node: NodeId, response: OwnerResponse) -> None:
        self._context.send_bulk(node, encode(response))
