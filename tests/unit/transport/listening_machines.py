"""Machines of a test: each with a real listener and policy, all on one loop and loopback."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from barnraise.core.config import NetworkSettings, Settings, StateSettings
from barnraise.core.errors import AgentError, BarnraiseError
from barnraise.identity import NodeId, NodeKey, delegate
from barnraise.transport.control.dial import (
    AGENT_RUN,
    AgentTls,
    ControlConnection,
    DialOptions,
    accept_agent,
    dial_unopened,
)
from barnraise.transport.listener.acceptor import ConnectionRefusal
from barnraise.transport.listener.listener import Listener
from barnraise.transport.listener.preface import ANY_AGENT, ROUTE_AGENT, ROUTE_AGENT_BULK, Preface, target_of

SECRET = bytes(range(32))


class Machine:
    """Policy that trusts the nodes in `friends` and keeps every connection."""

    def __init__(self, directory: Path, *, run: str = AGENT_RUN) -> None:
        self._key = NodeKey.generate()
        self.friends: set[NodeId] = {self._key.id}
        self.incarnation = os.urandom(16)
        self.tls = AgentTls(delegate(self._key, run=run, worker=self.incarnation), lambda: self.friends)
        self.word = SECRET
        self.accept_s = 60.0
        self.links: asyncio.Queue[ControlConnection] = asyncio.Queue()
        self.refusals: asyncio.Queue[BarnraiseError] = asyncio.Queue()
        self.messages: asyncio.Queue[tuple[ControlConnection, bytes]] = asyncio.Queue()
        self.ends: asyncio.Queue[tuple[ControlConnection, str]] = asyncio.Queue()
        self.made: list[ControlConnection] = []
        self.questions: list[bytes] = []
        self.runs: list[str] = []  # of the questions
        self.busy = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        settings = Settings(state=StateSettings(directory=str(directory)), network=NetworkSettings(port=0))
        self.listener = Listener(settings, policy=self)

    @property
    def key(self) -> NodeKey:
        return self._key

    @property
    def node(self) -> NodeId:
        return self._key.id

    def trusted(self, run: str) -> tuple[NodeId, ...]:
        return tuple(sorted(self.friends))

    def secret(self) -> bytes:
        return self.word

    def key_for(self, route: int, target: bytes) -> bytes | None:
        if route in (ROUTE_AGENT, ROUTE_AGENT_BULK) and target not in (ANY_AGENT, target_of(self.node)):
            return None
        return self.word

    def deliver(self, preface: Preface, connection: socket.socket, address: str) -> ConnectionRefusal | None:
        task = asyncio.get_running_loop().create_task(self._accept(preface, connection, address))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return None

    async def _accept(self, preface: Preface, connection: socket.socket, address: str) -> None:
        try:
            link = await accept_agent(
                connection, preface, address, tls=self.tls, timeout_s=self.accept_s, **self.callbacks()
            )
        except BarnraiseError as error:
            self.refusals.put_nowait(error)
        else:
            self.made.append(link)
            self.links.put_nowait(link)

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_message": lambda link, message: self.messages.put_nowait((link, message)),
            "on_closed": lambda link, why: self.ends.put_nowait((link, why)),
        }

    async def answer(self, question: bytes, run: str) -> bytes:
        self.runs.append(run)
        self.questions.append(question)
        if question == b"refuse":
            raise AgentError("not today", hint="Come tomorrow.")
        if question == b"fail":
            raise ZeroDivisionError
        if question == b"wait":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.busy.set()
                raise
        return question * 2 if len(question) < 100 else question

    def refuse_run(self, run: str) -> str | None:
        return "this run is not known" if run == "unknown" else None

    async def dial(self, other: Machine, **changes: Any) -> ControlConnection:
        link = await self.dial_unopened(other, **changes)
        link.begin(**self.callbacks())
        self.made.append(link)
        return link

    async def dial_unopened(
        self, other: Machine, address: str = "127.0.0.1", port: int | None = None, **changes: Any
    ) -> ControlConnection:
        return await dial_unopened(address, port or other.listener.port, self.options(other, **changes))

    def options(self, other: Machine, **changes: Any) -> DialOptions:
        options = DialOptions(ROUTE_AGENT, target_of(other.node), self.word, self.tls, other.node, 60.0)
        return replace(options, **changes)


class Street:
    """Factory of machines that trust each other; it closes them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.machines: list[Machine] = []

    async def machine(self, *, stranger: bool = False, **options: Any) -> Machine:
        new = Machine(self._directory / str(len(self.machines)), **options)
        await new.listener.start()
        self.machines.append(new)
        if not stranger:
            for other in self.machines:
                other.friends.add(new.node)
                new.friends.add(other.node)
        return new

    async def close(self) -> None:
        for machine in self.machines:
            for link in machine.made:
                link.close("the test is over")
            for task in machine.tasks:
                task.cancel()
            await machine.listener.stop()
        await asyncio.sleep(0.02)  # transports close on the loop's next turns


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run on the loop that agents use; a test that hangs fails."""
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(asyncio.wait_for(test, 120))
