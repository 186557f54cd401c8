"""The agent's checks with its real interfaces, and with real agents."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from barnraise.agent import protocol
from barnraise.agent.cluster.join import join
from barnraise.agent.daemon import Agent
from barnraise.agent.diagnostics import collect, reachability
from barnraise.agent.diagnostics.reachability import (
    ReachabilityProber,
)
from barnraise.agent_client.cluster_requests import CheckRow, JoinClusterRequest
from barnraise.core.config import NetworkSettings, Settings, StateSettings
from barnraise.discovery import Sighting, namespace_tag
from barnraise.identity import NodeKey, delegate
from barnraise.identity.trust import TrustLog
from barnraise.membership.consensus.paxos import founded
from barnraise.membership.effects import LogNote
from barnraise.membership.history import StoredHistory
from barnraise.membership.node import MembershipNode
from barnraise.membership.view import PresentMember, first
from barnraise.transport.control.dial import AGENT_RUN, AgentTls, ControlConnection
from barnraise.transport.listener import acceptor


def test_prefix_of_netmask_and_invalid() -> None:
    assert collect.prefix_of("255.255.255.0") == 24
    assert collect.prefix_of("ffff:ffff:ffff:ffff::") == 64
    assert collect.prefix_of("nonsense") == 32


def test_own_interfaces_include_loopback() -> None:
    interfaces = {interface.address: interface for interface in collect.own_interfaces()}
    assert interfaces["127.0.0.1"].kind == "loopback"
    assert interfaces["127.0.0.1"].prefix == 8


def test_stall_events_are_parsed_from_log() -> None:
    """The membership notes its own late ticks; the doctor reads them."""
    key = NodeKey.generate()
    log = TrustLog.found(key, "here")
    me = PresentMember(key.id.raw, bytes(16))
    member = MembershipNode(
        me, key, StoredHistory(founded(first(key.id.raw, bytes(16), len(log))), log), random.Random(1), 0.0
    )
    member.tick(0.1)
    notes = [effect.text for effect in member.tick(9.1) if isinstance(effect, LogNote)]
    matches = [match for note in notes if (match := collect._ASLEEP.search(note))]
    assert [float(match[1]) for match in matches] == [9.0]


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give dials as long as this machine needs."""
    monkeypatch.setattr(reachability, "DIAL_S", 30.0)
    monkeypatch.setattr(reachability, "_ANSWER_S", 60.0)
    monkeypatch.setattr(collect, "_GATHER_S", 60.0)
    monkeypatch.setattr(acceptor, "PREFACE_DEADLINE_S", 60.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


class Patient(Agent):
    """An agent with its prober."""

    prober: ReachabilityProber

    async def start(self) -> None:
        await super().start()
        tls = AgentTls(delegate(self.key, run=AGENT_RUN, worker=self.incarnation), lambda: self.log.members)
        self.prober = ReachabilityProber(
            tls, self.peer_store.address_of, self.secret_for, self.connections.get, lambda node: True
        )

    def received(self, link: ControlConnection, message: bytes) -> None:
        if message[:1] == protocol.SURVEY:
            self.prober.received(link, message[1:])
        else:
            super().received(link, message)


def settings(directory: Path) -> Settings:
    # A port of its own for discovery: other tests' agents must not be found.
    network = NetworkSettings(port=0, discovery_port=52999, addresses=("127.0.0.1",))
    return Settings(state=StateSettings(directory=str(directory)), network=network)


async def examine(agent: Patient) -> dict[str, list[CheckRow]]:
    rows: dict[str, list[CheckRow]] = {}
    for row in (await collect.check(agent, agent.prober)).rows:
        rows.setdefault(row.name, []).append(row)
    return rows


@pytest.mark.slow
@pytest.mark.usefixtures("_patient")
def test_check_finds_cloned_machine(tmp_path: Path) -> None:
    async def main() -> None:
        original = Patient(settings(tmp_path / "1"))
        await original.start()
        await original.stop()
        shutil.copytree(tmp_path / "1", tmp_path / "2", ignore=shutil.ignore_patterns("*.sock"))
        original, copy = Patient(settings(tmp_path / "1")), Patient(settings(tmp_path / "2"))
        await original.start()
        await copy.start()
        try:
            assert (await examine(original))["cloned-key"][0].state == "ok"
            tag = namespace_tag(original.log.secret)
            seen = Sighting("127.0.0.1", copy.listener.port, tag, "mdns")
            original.discovery.discovery.sightings = lambda: (seen,)  # type: ignore[method-assign]
            (row,) = (await examine(original))["cloned-key"]
            assert row.state == "fail"
            assert "here and 127.0.0.1" in row.sentence
        finally:
            await copy.stop()
            await original.stop()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(asyncio.wait_for(main(), 180))


@pytest.mark.slow
@pytest.mark.usefixtures("_patient")
def test_check_two_agents_before_and_after_one_stops(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = Patient(settings(tmp_path / "1")), Patient(settings(tmp_path / "2"))
        await first.start()
        await second.start()
        first.rename("one")
        second.rename("two")
        try:
            alone = await examine(first)
            assert set(alone) == {"discovery", "cloned-key", "quorum", "stalls"}
            code = str(first.pairing.open_code("owner").secret)
            await join(second, JoinClusterRequest(code, at=f"127.0.0.1:{first.listener.port}"))
            await until(
                lambda: (
                    first.connections.get(second.me) is not None
                    and first.member.view.of(second.me.raw) is not None
                )
            )
            together = await examine(first)
            (reach,) = together["reach"]
            assert (reach.state, reach.peer) == ("ok", "two")
            assert reach.sentence.startswith("both directions")
            assert {row.state for row in together["versions"] + together["clock"]} == {"ok"}
            assert together["cloned-key"][0].state == "ok"
            assert together["quorum"][0].state == "ok"
            # It accepts no more connections while it stops, like a process that has exited.
            second.connections.accept = lambda *call: call[0].close()  # type: ignore[method-assign]
            await second.stop()
            await until(lambda: first.connections.get(second.me) is None)
            missed = await examine(first)
            assert missed["reach"][0].state == "warn"
            assert "no agent listens there" in missed["reach"][0].sentence
        finally:
            await first.stop()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(asyncio.wait_for(main(), 180))
