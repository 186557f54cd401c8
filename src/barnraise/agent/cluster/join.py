"""Client side of pairing: find the machine that offers a code or key, prove it, and enter its cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import socket
import time
from collections.abc import Callable

from barnraise.agent.cluster.admission import enter
from barnraise.agent.cluster.machine_names import name_clash
from barnraise.agent.cluster.pairing_frames import receive_exactly, receive_message, send_message
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
    psk_preface_key,
)
from barnraise.pairing.spent_codes import decode_spent, encode_spent, is_spent, with_spent
from barnraise.transport.addresses import show_address
from barnraise.transport.listener.preface import (
    ANSWER_BYTES,
    PAIRING_KEY,
    ROUTE_PAIRING,
    Preface,
    PrefaceAnswer,
    encode,
    parse_answer,
)

_RESOLVE_S = 5.0
_CONNECT_S = 5.0
_GRANT_S = 50.0  # longer than the server waits for the cluster's decision
_TRIES = 4
_RETRY_S = 0.7
_SPENT_FACT = "spent codes"


async def join(agent: Agent, request: JoinClusterRequest) -> str:
    """Join the cluster that offers a code, and return what was granted; raise PairingError if it fails."""
    code = parse_code(request.code)
    _check_alone(agent)
    if is_spent(decode_spent(agent.storage.fact(_SPENT_FACT)), code, time.time()):
        raise PairingError(
            "this code was tried here before, and a code allows one try",
            hint="Run `barnraise pair` on the other machine again, and type the new code here.",
        )
    address, port = await _find(agent, code, request)
    joined = await _join_at(agent, code, address, port, request.role)
    return _granted(agent, joined)


async def join_by_psk(agent: Agent, psk: Psk, patience_s: float) -> bool:
    """Join the cluster of a machine that has the key; return False if none is found in time."""
    sighting = await agent.discovery.look_for(psk.tag.hex(), patience_s)
    if sighting is None:
        return False
    joined = await _join_at(agent, psk, sighting.address, sighting.port, psk.role)
    agent.report_event(_granted(agent, joined).replace("\n", " "))
    return True


def _granted(agent: Agent, joined: PairingJoined) -> str:
    clash = name_clash(agent.me, agent.named_machines(), agent.me)
    return grant_text(joined.role, "joiner", joined.offerer_name, clash=clash)


async def pair_with(
    joiner: Joiner,
    secret: PairingCode | Psk,
    address: str,
    port: int,
    on_guess: Callable[[], None] = lambda: None,
) -> PairingJoined:
    """Pair with the machine at this address, with the one guess that a code allows.

    ``on_guess`` is called before that guess is sent. Raise PairingError if the pairing fails.
    """
    where = show_address(address, port)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for tries_left in reversed(range(_TRIES)):
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            try:
                answer = await _connect(connection, secret, address, port)
            except ConnectionResetError as error:
                # The guess is not spent yet: other connections may have filled the server's queue.
                if tries_left:
                    await asyncio.sleep(_RETRY_S)
                    continue
                raise _no_answer(where, error) from error
            except (OSError, TimeoutError) as error:
                raise _no_answer(where, error) from error
            if answer.refusal is not None:
                raise PairingError(f"{where} rejected the code: {answer.refusal}")
            return await _exchange(connection, joiner, on_guess)
    raise AssertionError("the last try has returned or raised")


def _check_alone(agent: Agent) -> None:
    others = [agent.name_of(node) for node in agent.log.members if node != agent.me]
    if others:
        raise PairingError(
            f"this machine is in a cluster with {', '.join(others)} already",
            hint="To leave it permanently: barnraise leave, then barnraise up. To add machines to it, run "
            "`barnraise pair` here.",
        )


async def _find(agent: Agent, code: PairingCode, request: JoinClusterRequest) -> tuple[str, int]:
    if request.at:
        return await _resolve(request.at, agent.settings.network.port)
    agent.discovery.discovery.check()
    sighting = await agent.discovery.look_for(code.tag.hex(), request.patience_s)
    if sighting is None:
        raise PairingError(
            f"no machine on this network offers code {code.number} (looked for {request.patience_s:g} s)",
            hint="Check that `barnraise pair` still waits on the other machine and that both are on one "
            "network; or name it: barnraise join CODE --at HOST.",
        )
    return sighting.address, sighting.port


async def _resolve(place: str, default_port: int) -> tuple[str, int]:
    host, port = place, default_port
    if place.count(":") == 1:
        host, _, text = place.partition(":")
        if not text.isdigit() or not 0 < int(text) < 65536:
            raise PairingError(f"{place!r} is not an address", hint="Write HOST or HOST:PORT.")
        port = int(text)
    loop = asyncio.get_running_loop()
    try:
        entries = await asyncio.wait_for(
            loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM), _RESOLVE_S
        )
    except (OSError, TimeoutError) as error:
        raise PairingError(f"cannot resolve {host!r}: {error.strerror or 'no answer in time'}") from error
    addresses = [str(entry[4][0]) for entry in entries if entry[4][0] != "127.0.1.1"]
    if not addresses:
        raise PairingError(f"{host!r} has no address that can be dialled", hint="Give its IP address.")
    return addresses[0], port


async def _join_at(
    agent: Agent, secret: PairingCode | Psk, address: str, port: int, role: Role | None
) -> PairingJoined:
    introduction = PeerIntroduction(
        name=agent.name,
        platform=f"{platform.system()} {platform.machine()}",
        addresses=tuple(agent.own_addresses()[:8]),
        port=agent.listener.port,
    )
    joiner = Joiner(secret, agent.key, introduction, role=role)

    def remember_guess() -> None:
        if isinstance(secret, PairingCode):
            spent = with_spent(decode_spent(agent.storage.fact(_SPENT_FACT)), secret, time.time())
            agent.storage.keep_fact(_SPENT_FACT, encode_spent(spent))

    async with agent.membership_lock:
        _check_alone(agent)  # a machine may have joined us meanwhile
        joined = await pair_with(joiner, secret, address, port, remember_guess)
        agent.report_event(f"paired with {joined.offerer_name} as {joined.role}")
        agent.audit.write(
            "cluster-joined",
            subject=joined.log.cluster.hex()[:8],
            by=joined.offerer_name,
            detail=f"as {joined.role}, with a {'pre-shared key' if isinstance(secret, Psk) else 'code'}",
        )
        await enter(agent, joined.log, list(joined.peers))
    return joined


async def _connect(
    connection: socket.socket, secret: PairingCode | Psk, address: str, port: int
) -> PrefaceAnswer:
    loop = asyncio.get_running_loop()
    key = psk_preface_key(secret) if isinstance(secret, Psk) else PAIRING_KEY
    async with asyncio.timeout(_CONNECT_S):
        await loop.sock_connect(connection, (address, port))
        preface = Preface(secret.tag, os.urandom(16), ROUTE_PAIRING)
        await loop.sock_sendall(connection, encode(preface, key))
        return parse_answer(await receive_exactly(connection, ANSWER_BYTES))


def _no_answer(where: str, error: OSError) -> PairingError:
    return PairingError(
        f"{where} does not answer: {error.strerror or str(error) or 'no answer in time'}",
        hint="Check that the code is still open there, and that its firewall allows the port.",
    )


async def _exchange(connection: socket.socket, joiner: Joiner, on_guess: Callable[[], None]) -> PairingJoined:
    step = joiner.begin()
    try:
        while True:
            if joiner.has_proved and step.done is None:
                on_guess()
            if step.send is not None:
                await send_message(connection, step.send)
            if isinstance(step.done, PairingJoined):
                with contextlib.suppress(OSError, TimeoutError):  # stay until the peer has the last message
                    await asyncio.wait_for(receive_exactly(connection, 1), 1.0)
                return step.done
            step = joiner.receive(await receive_message(connection, joiner.limit, _GRANT_S))
    except (OSError, TimeoutError) as error:
        raise joiner.lost() from error
