"""Key-value store for guests: an owner's agent executes the operations of their workers.

Guests hold no replica, because it has keys of runs that are not theirs. An owner executes only operations for
a generation in which the guest has workers.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.agent import protocol
from barnraise.agent.context import AgentContext
from barnraise.agent.runs.registry import RunRegistry
from barnraise.agent_client.kv_messages import KvDenied, Namespace, Operation, Result, WatchKey
from barnraise.core.errors import ProtocolError
from barnraise.identity import NodeId

_MAX_OPERATIONS = 256  # operations of one guest
_SLICE_S = 10.0
_MARGIN_S = 2.0

Serial = Annotated[int, Meta(ge=0, le=2**53)]


class KvProxyRequest(msgspec.Struct, frozen=True, array_like=True, tag="please"):
    """An operation of a guest's worker on the key-value store."""

    serial: Serial
    operation: Operation | WatchKey
    patience_s: Annotated[float, Meta(ge=0, le=3600)]


class KvProxyReply(msgspec.Struct, frozen=True, array_like=True, tag="here"):
    """The result of an operation."""

    serial: Serial
    result: Result


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[KvProxyRequest | KvProxyReply] = msgspec.msgpack.Decoder(
    KvProxyRequest | KvProxyReply
)


class KvProxy:
    """Client of the proxy on a guest's machine, and its server on an owner's machine."""

    def __init__(self, context: AgentContext, registry: RunRegistry) -> None:
        self._context = context
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._serial = 0
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._working: dict[NodeId, int] = {}

    @property
    def is_needed(self) -> bool:
        """Return True if this machine is a guest."""
        return self._context.log.role(self._context.me) == "guest"

    async def request(self, operation: Operation | WatchKey, patience_s: float) -> Result:
        """Execute an operation for a worker of this machine; retry with another owner if one fails."""
        deadline = self._loop.time() + patience_s
        while True:
            left_s = deadline - self._loop.time()
            owner = self._owner()
            if owner is not None:
                result = await self._ask(owner, operation, min(left_s, _SLICE_S))
                is_late = isinstance(result, KvDenied) and result.reason == "late"
                if result is not None and not (is_late and left_s > _SLICE_S):
                    return result
            if self._loop.time() >= deadline:
                message = "no owner's machine answered this guest"
                return KvDenied("late", message, "Run `barnraise status`.")
            await asyncio.sleep(0.2)

    def received(self, node: NodeId, body: memoryview) -> None:
        """Handle a message of another agent: a request of a guest, or a reply of an owner."""
        message = protocol.decode(_decoder, body)
        if isinstance(message, KvProxyReply):
            if self._context.log.role(node) != "owner":
                raise ProtocolError(f"{node.short} is a guest and cannot answer for the key-value store")
            future = self._waiting.get(message.serial)
            if future is not None and not future.done():
                future.set_result(message.result)
            return
        refusal = self._refusal(node, message.operation.scope)
        if refusal is not None:  # no reason to disconnect: the generation may have ended just now
            self._send(node, KvProxyReply(message.serial, KvDenied("stale", refusal, "Stop this process.")))
            return
        if self._working.get(node, 0) >= _MAX_OPERATIONS:
            raise ProtocolError(f"{node.short} has too many open operations on the key-value store")
        self._working[node] = self._working.get(node, 0) + 1
        self._context.spawn(self._serve(node, message))

    async def _serve(self, node: NodeId, message: KvProxyRequest) -> None:
        try:
            result = await self._context.kv.request(message.operation, message.patience_s)
            self._send(node, KvProxyReply(message.serial, result))
        finally:
            self._working[node] -= 1

    async def _ask(self, owner: NodeId, operation: Operation | WatchKey, patience_s: float) -> Result | None:
        self._serial += 1
        serial = self._serial
        future: asyncio.Future[Result] = self._loop.create_future()
        self._waiting[serial] = future
        try:
            self._send(owner, KvProxyRequest(serial, operation, max(0.0, patience_s)))
            return await asyncio.wait_for(future, patience_s + _MARGIN_S)
        except TimeoutError:
            return None
        finally:
            del self._waiting[serial]

    def _owner(self) -> NodeId | None:
        """Return the most senior connected owner, which nearly always is the primary."""
        linked = set(self._context.linked_nodes())
        seniors = (NodeId(raw) for raw in self._context.member.view.voters)
        return next((node for node in seniors if node in linked), None)

    def _refusal(self, node: NodeId, scope: Namespace) -> str | None:
        entry = self._registry.runs.get(scope.run)
        if entry is None or entry.record.generation != scope.generation or entry.record.phase != "running":
            return f"{scope} is not running"
        if node.raw not in {slot.node for slot in (*entry.record.slots, *entry.record.joining)}:
            return f"this guest has no worker in {scope}"
        return None

    def _send(self, node: NodeId, message: KvProxyRequest | KvProxyReply) -> None:
        self._context.send_bulk(node, protocol.GUEST_BOARD + _encoder.encode(message))
