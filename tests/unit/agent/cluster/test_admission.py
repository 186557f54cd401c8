"""A new key for a machine, with real agents."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from barnraise.agent.api.cluster_api import answer
from barnraise.agent.cluster.admission import use_next_key
from barnraise.agent.cluster.join import join
from barnraise.agent.daemon import Agent
from barnraise.agent_client.cluster_requests import JoinClusterRequest, RotateKeyRequest, encode
from barnraise.core.config import NetworkSettings, Settings, StateSettings
from barnraise.core.errors import AgentError, MembershipError
from barnraise.identity import NodeId
from barnraise.identity.trust import Role


def _settings(directory: Path) -> Settings:
    # A port of its own for discovery: other tests' agents must not be found.
    network = NetworkSettings(port=0, discovery_port=52997, addresses=("127.0.0.1",))
    return Settings(state=StateSettings(directory=str(directory)), network=network)


async def _until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def _started(directory: Path) -> Agent:
    agent = Agent(_settings(directory))
    await agent.start()
    return agent


async def _paired(offerer: Agent, joiner: Agent, role: Role = "owner") -> None:
    code = str(offerer.pairing.open_code(role).secret)
    await join(joiner, JoinClusterRequest(code, at=f"127.0.0.1:{offerer.listener.port}"))
    await _until(lambda: offerer.connections.get(joiner.me) is not None)


async def _rotated(agent: Agent) -> Agent:
    """Change the key of an agent as its process does, and return the agent that follows."""
    await answer(agent, encode(RotateKeyRequest()), "")
    assert agent.changes_key
    await agent.stop()
    use_next_key(agent.directory)
    return await _started(agent.directory)


def _run(story: Callable[[], object]) -> None:
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(asyncio.wait_for(story(), 180))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("senior", [True, False])
def test_machine_goes_on_with_a_new_key_and_the_old_one_is_dead(tmp_path: Path, senior: bool) -> None:
    """Tries the copy of the old key afterwards: no machine lets it in."""

    async def story() -> None:
        first, second = await _started(tmp_path / "1"), await _started(tmp_path / "2")
        await _paired(first, second)
        chosen, other = (first, second) if senior else (second, first)
        old, name = chosen.me, chosen.name
        shutil.copytree(chosen.directory, tmp_path / "3", ignore=shutil.ignore_patterns("*.sock", "ipc"))
        after = await _rotated(chosen)
        try:
            assert after.me != old
            nodes = {after.me.raw, other.me.raw}
            await _until(lambda: {*after.member.view.nodes} == {*other.member.view.nodes} == nodes)
            await _until(lambda: after.member.is_member and other.member.is_member)
            for agent in (after, other):
                assert agent.log.role(old) is None
                assert agent.log.members[after.me].name == name
                assert agent.member.quorum_status(asyncio.get_running_loop().time()).decides
            copy = await _started(tmp_path / "3")
            try:
                assert copy.me == old
                await asyncio.sleep(3.0)
                assert other.connections.get(old) is None
                assert other.member.view.of(old.raw) is None
            finally:
                await copy.stop()
        finally:
            await after.stop()
            await other.stop()

    _run(story)


@pytest.mark.slow
def test_machine_alone_changes_its_key_and_survives_a_crash_before_the_new_start(tmp_path: Path) -> None:
    async def story() -> None:
        agent = await _started(tmp_path / "1")
        old = agent.me
        await answer(agent, encode(RotateKeyRequest()), "")
        await agent.stop()  # its process is killed here, before it uses the new key
        again = await _started(tmp_path / "1")
        try:
            assert again.me != old
            assert again.log.current(old) == again.me
            assert not (tmp_path / "1" / "node.key.next").exists()
            await _until(lambda: again.member.is_member)
        finally:
            await again.stop()

    _run(story)


@pytest.mark.slow
def test_key_stays_if_no_other_owner_could_tell_the_rest(tmp_path: Path) -> None:
    async def story() -> None:
        first, second = await _started(tmp_path / "1"), await _started(tmp_path / "2")
        guest = await _started(tmp_path / "3")
        await _paired(first, second)
        await _paired(first, guest, "guest")
        with pytest.raises(AgentError, match="is a guest"):
            await answer(guest, encode(RotateKeyRequest()), "")
        away: NodeId = second.me
        await second.stop()
        await _until(lambda: first.connections.get(away) is None)
        with pytest.raises(MembershipError, match="no other owner"):
            await answer(first, encode(RotateKeyRequest()), "")
        await guest.stop()
        await first.stop()

    _run(story)
