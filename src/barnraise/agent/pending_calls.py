"""Requests to other agents that wait for their response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from barnraise.agent.context import AgentContext
from barnraise.agent.runs.messages import AgentAnswer, AgentQuestion, encode
from barnraise.core.errors import ProtocolError, TransportError
from barnraise.identity import NodeId

T = TypeVar("T", bound=AgentAnswer)


class PendingCalls:
    """Open requests of one service; responses are matched by machine and serial number."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._serial = 0
        self._waiting: dict[tuple[NodeId, int], asyncio.Future[AgentAnswer]] = {}

    async def ask(
        self, node: NodeId, make: Callable[[int], AgentQuestion], expected: type[T], timeout_s: float
    ) -> T:
        """Send a request and return its response; raise TransportError after ``timeout_s``.

        ``make`` builds the request from its serial number.
        """
        self._serial += 1
        key = (node, self._serial)
        future: asyncio.Future[AgentAnswer] = self._loop.create_future()
        self._waiting[key] = future
        try:
            self._context.send_bulk(node, encode(make(self._serial)))
            response = await asyncio.wait_for(future, timeout_s)
        except TimeoutError as error:
            name = self._context.name_of(node)
            raise TransportError(f"{name} did not answer within {timeout_s:g} s") from error
        finally:
            del self._waiting[key]
        if not isinstance(response, expected):
            raise ProtocolError(f"{node.short} sent a response of the wrong type")
        return response

    def resolve(self, node: NodeId, message: AgentAnswer) -> None:
        """Deliver a response; drop one that was not requested from this node."""
        future = self._waiting.get((node, message.serial))
        if future is not None and not future.done():
            future.set_result(message)

    def link_down(self, node: NodeId) -> None:
        """Fail all requests to a machine whose connection is lost."""
        for (other, _), future in self._waiting.items():
            if other == node and not future.done():
                future.set_exception(
                    TransportError(f"the connection to {self._context.name_of(node)} was lost")
                )
