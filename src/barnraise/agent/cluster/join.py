"""How this machine joins another's cluster: find who offers, use the one guess, enter."""

from __future__ import annotations

import asyncio
import platform
import socket

from barnraise.agent.cluster.admission import enter
from barnraise.agent.cluster.pairing_server import join_by
from barnraise.agent.daemon import Agent
from barnraise.agent_client.cluster_requests import JoinClusterRequest
from barnraise.core.errors import PairingError
from barnraise.identity.trust import Role
from barnraise.pairing import (
    Joiner,
    PairingCode,
    PairingJoined,
    PeerIntroduction,
    Psk,
    grant_text,
    parse_code,
)

_RESOLVE_S = 5.0


async def join(agent: Agent, question: JoinClusterRequest) -> str:
    """Returns what was granted; PairingError says what to do."""
    code = parse_code(question.code)
    _check_alone(agent)
    address, port = await _find(agent, code, question)
    joined = await _pair(agent, code, address, port, question.role)
    return grant_text(joined.role, "joiner", joined.offerer_name)


async def join_by_psk(agent: Agent, psk: Psk, patience_s: float) -> bool:
    """Whether a machine that has the key was found and joined."""
    sighting = await agent.search.look_for(psk.tag.hex(), patience_s)
    if sighting is None:
        return False
    joined = await _pair(agent, psk, sighting.address, sighting.port, psk.role)
    agent.say(grant_text(joined.role, "joiner", joined.offerer_name))
    return True


def _check_alone(agent: Agent) -> None:
    others = [agent.name_of(node) for node in agent.log.members if node != agent.me]
    if others:
        raise PairingError(
            f"this machine is in a cluster with {', '.join(others)} already",
            hint="To leave it for good: barnraise leave, then barnraise up. To add machines to it, run "
            "`barnraise pair` here.",
        )


async def _find(agent: Agent, code: PairingCode, question: JoinClusterRequest) -> tuple[str, int]:
    if question.at:
        return await _resolve(question.at, agent.settings.network.port)
    agent.search.discovery.check()
    sighting = await agent.search.look_for(code.tag.hex(), question.patience_s)
    if sighting is None:
        raise PairingError(
            f"no machine on this network offers code {code.number} (looked for {question.patience_s:g} s)",
            hint="Check that `barnraise pair` still waits on the other machine and that both are on one "
            "network; or name it: barnraise join CODE --at HOST.",
        )
    return sighting.address, sighting.port


async def _resolve(place: str, default_port: int) -> tuple[str, int]:
    host, port = place, default_port
    if place.count(":") == 1:
        host, _, text = place.partition(":")
        if not text.isdigit() or not 0 < int(text) < 65536:
            raise PairingError(f"{place!r} is no place", hint="Write HOST or HOST:PORT.")
        port = int(text)
    loop = asyncio.get_running_loop()
    try:
        found = await asyncio.wait_for(
            loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM), _RESOLVE_S
        )
    except (OSError, TimeoutError) as error:
        raise PairingError(f"{host!r} cannot be found: {error.strerror or 'no answer in time'}") from error
    addresses = [str(entry[4][0]) for entry in found if entry[4][0] != "127.0.1.1"]
    if not addresses:
        raise PairingError(f"{host!r} has no address that can be dialled", hint="Give its IP address.")
    return addresses[0], port


async def _pair(
    agent: Agent, secret: PairingCode | Psk, address: str, port: int, role: Role | None
) -> PairingJoined:
    introduction = PeerIntroduction(
        name=agent.name,
        platform=f"{platform.system()} {platform.machine()}",
        addresses=tuple(agent.addresses()[:8]),
        port=agent.listener.port,
    )
    joiner = Joiner(secret, agent.key, introduction, role=role)
    async with agent.changing:
        _check_alone(agent)  # somebody may have joined us meanwhile
        joined = await join_by(joiner, secret, address, port)
        agent.say(f"paired with {joined.offerer_name} as {joined.role}")
        await enter(agent, joined.log, list(joined.peers))
    return joined
