"""Agent listeners at local sockets in one process, each with a replica of the key-value store.

Only membership and the network between the machines are replaced: messages are delivered directly,
and the test decides the views.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TypeVar

from barnraise.agent_client.cluster_requests import decode_request as decode_agent_request
from barnraise.agent_client.cluster_requests import encode as encode_answer
from barnraise.agent_client.kv_messages import (
    ClusterRequest,
    ClusterResponse,
    KvResponse,
    Result,
    decode_request,
    encode,
)
from barnraise.agent_client.run_requests import RolesRequest, RolesResponse
from barnraise.core.config import NetworkSettings, Settings, StateSettings
from barnraise.core.errors import AgentError, ProtocolError
from barnraise.kvstore.messages import (
    Effect,
    ReplicaAnswer,
    ReplicaSend,
    ReplicaView,
    decode_message,
    encode_message,
)
from barnraise.kvstore.replica import TICK_S, KvReplica
from barnraise.transport.listener.connection_policy import SettingsConnectionPolicy
from barnraise.transport.listener.listener import Listener

T = TypeVar("T")


def is_quorum(view: ReplicaView, agreeing: set[bytes]) -> bool:
    voters = [node for node in view.members if node in view.voters]
    yes = sum(node in agreeing for node in voters)
    return 2 * yes > len(voters) or (2 * yes == len(voters) > 0 and voters[0] in agreeing)


class Machine(SettingsConnectionPolicy):
    """Connection policy of one machine, with its replica."""

    def __init__(self, servers: KvServers, name: bytes, settings: Settings) -> None:
        super().__init__(settings)
        self.name = name
        self.servers = servers
        self.replica = KvReplica(name, is_quorum, os.urandom(16), name=bytes.decode)
        self.listener = Listener(settings, any_port=True, policy=self)
        self.waiting: dict[object, asyncio.Future[Result]] = {}
        self.questions = 0

    async def answer(self, question: bytes, run: str) -> bytes:
        self.questions += 1
        with contextlib.suppress(ProtocolError):
            if isinstance(decode_agent_request(question), RolesRequest):
                here = self.name.ljust(32)
                return encode_answer(RolesResponse(here=here, owners=(here,)))
        request = decode_request(question)
        if isinstance(request, ClusterRequest):
            view = self.servers.view
            return encode(ClusterResponse(self.servers.world, view.members.index(self.name), view.number))
        if self.servers.mute:
            raise AgentError("the agent is being tested")
        ticket = object()
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.waiting[ticket] = future
        try:
            self.perform(
                self.replica.request(request.operation, ticket, time.monotonic(), request.patience_s)
            )
            return encode(KvResponse(await future))
        finally:
            del self.waiting[ticket]
            self.replica.cancel(ticket)

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ReplicaSend):
                self.servers.carry(self.name, effect.to, encode_message(effect.message))
            elif isinstance(effect, ReplicaAnswer) and effect.ticket in self.waiting:
                future = self.waiting[effect.ticket]
                if not future.done():
                    future.set_result(effect.result)


class KvServers:
    """Context manager that runs the machines; ``directories[i]`` is the state directory of machine i."""

    def __init__(self, root: Path, machines: int = 1) -> None:
        self.names = [b"node%d" % number for number in range(machines)]
        self.directories = [root / f"m{number}" for number in range(machines)]
        self.world = machines
        self.mute = False
        self.dead: set[bytes] = set()
        self.view = ReplicaView(1, tuple(self.names), frozenset(self.names))
        self.machines: dict[bytes, Machine] = {}
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> KvServers:
        self._thread.start()
        self.call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(90)
        self._loop.close()

    def call(self, work: Coroutine[object, object, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(90)

    def on_loop(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(90)

    def carry(self, sender: bytes, target: bytes, data: bytes) -> None:
        def deliver() -> None:
            machine = self.machines.get(target)
            if machine is not None and not {sender, target} & self.dead:
                machine.perform(machine.replica.receive(sender, decode_message(data), time.monotonic()))

        self._loop.call_soon(deliver)

    def kill(self, name: bytes) -> None:
        """The machine is silent from now on; its door stays, so that clients see only that."""
        self.on_loop(lambda: self.dead.add(name))

    def change_view(self, *members: bytes) -> None:
        def change() -> None:
            self.view = ReplicaView(self.view.number + 1, members, frozenset(members))
            for name in members:
                machine = self.machines[name]
                machine.perform(machine.replica.on_view_change(self.view, time.monotonic()))

        self.on_loop(change)

    async def restart_listener(self, name: bytes) -> None:
        machine = self.machines[name]
        await machine.listener.stop()
        machine.listener = Listener(machine.listener._settings, any_port=True, policy=machine)
        await machine.listener.start()

    async def _start(self) -> None:
        for name, directory in zip(self.names, self.directories, strict=True):
            settings = Settings(
                state=StateSettings(directory=str(directory)), network=NetworkSettings(port=_free_port())
            )
            self.machines[name] = Machine(self, name, settings)
            await self.machines[name].listener.start()
        for machine in self.machines.values():
            machine.perform(machine.replica.on_view_change(self.view, time.monotonic()))
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for machine in self.machines.values():
                if machine.name not in self.dead:
                    machine.perform(machine.replica.tick(time.monotonic()))

    async def _stop(self) -> None:
        self._ticking.cancel()
        for machine in self.machines.values():
            await machine.listener.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
