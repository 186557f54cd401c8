"""Questions about checkpoints to other agents, each with one answer or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from barnraise.agent.runs.messages import CheckpointAnswer, CheckpointRequest, encode
from barnraise.core.errors import ProtocolError, TransportError
from barnraise.identity import NodeId


class CallsHost(Protocol):
    """What calls need of the agent."""

    def name_of(self, node: NodeId) -> str: ...

    def send_bulk(self, node: NodeId, message: bytes) -> None: ...


T = TypeVar("T", bound=CheckpointAnswer)


class PendingCalls:
    """Those that wait for an answer."""

    def __init__(self, around: CallsHost) -> None:
        self._around = around
        self._loop = asyncio.get_running_loop()
        self._serial = 0
        self._waiting: dict[tuple[NodeId, int], asyncio.Future[CheckpointAnswer]] = {}

    async def ask(
        self, node: NodeId, make: Callable[[int], CheckpointRequest], expected: type[T], timeout_s: float
    ) -> T:
        """``make`` is given the question's serial number. A TransportError if no such answer comes."""
        self._serial += 1
        key = (node, self._serial)
        future: asyncio.Future[CheckpointAnswer] = self._loop.create_future()
        self._waiting[key] = future
        try:
            self._around.send_bulk(node, encode(make(self._serial)))
            answer = await asyncio.wait_for(future, timeout_s)
        except TimeoutError as error:
            name = self._around.name_of(node)
            raise TransportError(f"{name} did not answer within {timeout_s:g} s") from error
        finally:
            del self._waiting[key]
        if not isinstance(answer, expected):
            raise ProtocolError(f"{node.short} gave another answer than was asked for")
        return answer

    def answered(self, node: NodeId, message: CheckpointAnswer) -> None:
        """What nobody asked, or not that node, is dropped."""
        future = self._waiting.get((node, message.serial))
        if future is not None and not future.done():
            future.set_result(message)

    def link_down(self, node: NodeId) -> None:
        for (other, _), future in self._waiting.items():
            if other == node and not future.done():
                future.set_exception(TransportError(f"the link to {self._around.name_of(node)} is gone"))
