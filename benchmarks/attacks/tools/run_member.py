"""Cluster member without an agent that takes part in runs, for attacks with a valid key."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from barnraise.agent import protocol
from barnraise.agent.cluster.kv_proxy import KvProxyReply, KvProxyRequest
from barnraise.agent.runs import messages
from barnraise.agent.runs.messages import RecordUpdate, ReportUpdate
from barnraise.artifacts.transfer import messages as shipping
from barnraise.core.errors import BarnraiseError
from barnraise.environments.installed_packages import own_packages
from barnraise.identity import NodeId
from barnraise.runs.record import NodeReport, RunRecord, read_spec
from barnraise.transport.control.dial import ControlConnection
from barnraise.transport.listener.preface import ROUTE_AGENT, ROUTE_AGENT_BULK, ROUTE_AGENT_SHIP
from benchmarks.attacks.tools.guest import Agents, Guest, is_closed

_answers: msgspec.msgpack.Decoder[KvProxyRequest | KvProxyReply] = msgspec.msgpack.Decoder(
    KvProxyRequest | KvProxyReply
)
T = TypeVar("T")


class RunMember(Guest):
    """A member without an agent, on all routes; it stores the received records, reports and files."""

    def __init__(self, keep: str, agents: Agents) -> None:
        super().__init__(keep, agents)
        self.routes: dict[tuple[NodeId, int], ControlConnection] = {}
        self.records: dict[str, RunRecord] = {}
        self.reports: dict[tuple[NodeId, str], NodeReport] = {}
        self.received: list[object] = []
        self.on_received: Callable[[NodeId, object], None] = self._lack
        self._serial = 0

    def _received(self, link: ControlConnection, message: bytes) -> None:
        super()._received(link, message)
        kind, body, node = message[:1], message[1:], link.peer.node
        decoded: object = None
        if kind == protocol.RUN:
            decoded = messages.decode(body)
        elif kind == protocol.SHIP:
            decoded = shipping.decode(body)
        elif kind == protocol.GUEST_BOARD:
            decoded = _answers.decode(body)
        if isinstance(decoded, RecordUpdate):
            self.records[read_spec(decoded.record).run] = decoded.record
        elif isinstance(decoded, ReportUpdate):
            self.reports[node, decoded.report.run] = decoded.report
        if decoded is not None:
            self.received.append(decoded)
            self.on_received(node, decoded)

    def _lack(self, node: NodeId, message: object) -> None:
        """Answer requests for file pieces with "lacking", so that other machines do not wait for them."""
        link = self.routes.get((node, ROUTE_AGENT_SHIP))
        if isinstance(message, shipping.WantPieces) and link is not None:
            link.send(protocol.SHIP + shipping.encode(shipping.LacksPieces(message.names)))

    async def call(self, node: NodeId, route: int) -> ControlConnection:
        """Return a link on this route; an open one is reused."""
        link = self.routes.get((node, route))
        if link is None or link.closed is not None:
            link = self.routes[node, route] = await self.dial(node, route)
        return link

    async def come(self) -> None:
        """Connect to every agent, on every route."""
        for node in self.agents:
            for route in (ROUTE_AGENT, ROUTE_AGENT_BULK, ROUTE_AGENT_SHIP):
                link = await self.call(node, route)
                if route == ROUTE_AGENT:
                    self.links[node] = link

    async def is_cut_at(self, node: NodeId, message: bytes, route: int = ROUTE_AGENT_BULK) -> bool:
        """Return True if the agent closes the link after this message."""
        link = await self.call(node, route)
        link.send(message)
        return await is_closed(link)

    async def are_cut_at(self, message: bytes) -> int:
        """Return the number of agents that close the link after this message."""
        return sum(await asyncio.gather(*(self.is_cut_at(node, message) for node in self.agents)))

    def report(self, run: str, stage: str, **more: object) -> bytes:
        self._serial += 1
        report = NodeReport(
            run=run,
            incarnation=self.incarnation,
            serial=self._serial,
            stage=stage,  # type: ignore[arg-type]  # one of the stages, or a lie
            devices=("cpu",),
            packages=own_packages(()),
        )
        return messages.encode(ReportUpdate(replace(report, **more)))

    async def tell(self, message: bytes, route: int = ROUTE_AGENT_BULK) -> None:
        for node in self.agents:
            with contextlib.suppress(BarnraiseError):
                link = await self.call(node, route)
                link.send(message)

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Keep the guest in the view, like an honest one, while the body runs."""
        await self.enter()
        alive = asyncio.create_task(self.live(1000.0))
        try:
            yield
        finally:
            alive.cancel()
            await asyncio.gather(alive, return_exceptions=True)
            await self.leave()
            for link in self.routes.values():
                link.close("over")


async def until_found(find: Callable[[], T | None], seconds: float = 90.0) -> T:
    """Wait for a result and return it; raise TimeoutError if there is none in time."""
    end = asyncio.get_running_loop().time() + seconds
    while not (result := find()):
        if asyncio.get_running_loop().time() > end:
            raise TimeoutError("what the attack waits for did not come")
        await asyncio.sleep(0.01)
    return result
