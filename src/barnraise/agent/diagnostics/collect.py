"""Collects what only the agent can see for the doctor, within a few seconds."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from barnraise import __version__
from barnraise.agent.daemon import Agent
from barnraise.agent.diagnostics import checks
from barnraise.agent.diagnostics.checks import DialPath, LocalFacts, PeerFacts
from barnraise.agent.diagnostics.interfaces import Interface, by_address, hardware_ports, kind_of, leading_to
from barnraise.agent.diagnostics.reachability import DialBackReply, DialResult, ReachabilityProber
from barnraise.agent_client.cluster_requests import CheckResponse, CheckRow
from barnraise.core.command import runner
from barnraise.discovery import namespace_tag
from barnraise.identity import NodeId
from barnraise.membership.failure_detector import watched
from barnraise.transport.addresses import interface_states

MAX_PEERS = 16
_MAX_UNKNOWN = 8
_GATHER_S = 5.0
_COMMAND_S = 1.5
T = TypeVar("T")
_OS = {"linux": "linux", "darwin": "macos", "win32": "windows"}.get(sys.platform, sys.platform)
_ASLEEP = re.compile(r"asleep or stopped for ([\d.]+) s")


async def check(agent: Agent, prober: ReachabilityProber) -> CheckResponse:
    """Return the result of all checks of the agent, within about five seconds."""
    interfaces = await asyncio.to_thread(own_interfaces)
    order = _in_order(agent)
    chosen = order[:MAX_PEERS]
    tasks = {node: asyncio.ensure_future(_dial_peer(agent, prober, node)) for node in chosen}
    strangers = asyncio.ensure_future(_dial_unknown(agent, prober))
    await asyncio.wait([*tasks.values(), strangers], timeout=_GATHER_S)
    collected: dict[NodeId, _Collected] = {}
    for node, task in tasks.items():
        collected[node] = (
            task.result() if _is_good(task) else _Collected(dial_back_failure="there was no time to ask it")
        )
        task.cancel()
    unknown_dials = strangers.result() if _is_good(strangers) else ()
    strangers.cancel()
    peers = {node: _facts(agent, node, collected[node], interfaces) for node in chosen}
    rows = [
        *_peer_rows(agent, peers),
        *_cluster_rows(agent, peers.values(), [*_all_dials(collected.values()), *unknown_dials]),
    ]
    if len(order) > len(chosen):
        rest = len(order) - len(chosen)
        rows.append(CheckRow("reach", "ok", f"{rest} more machines were not dialled this time"))
    return CheckResponse(tuple(rows))


class _Collected(msgspec.Struct, frozen=True):
    """Results of dialling one peer and of being dialled by it."""

    dials: tuple[DialResult, ...] = ()
    dial_backs: tuple[DialResult, ...] = ()
    dial_back_failure: str = ""
    clock_ahead_s: float | None = None


async def _dial_peer(agent: Agent, prober: ReachabilityProber, node: NodeId) -> _Collected:
    link = agent.connections.get(node)
    first = [link.address] if link is not None else []
    dials, reply = await asyncio.gather(prober.dial_node(node, first), prober.request_dial_back(node))
    if isinstance(reply, DialBackReply):
        return _Collected(dials, reply.results, "", reply.wall_s - time.time())
    return _Collected(dials, (), reply)


async def _dial_unknown(agent: Agent, prober: ReachabilityProber) -> tuple[DialResult, ...]:
    """Dial sightings with the cluster's tag that belong to no known machine.

    A copy of this machine's key would answer at one of them.
    """
    others = [node for node in agent.log.members if node != agent.me]
    known = {
        (address, agent.peer_store[node].port)
        for node in others
        for address in agent.peer_store[node].addresses
    }
    secrets = {namespace_tag(secret): secret for secret in agent.log.secrets}
    sightings = [
        sighting
        for sighting in reversed(agent.discovery.discovery.sightings())
        if sighting.tag in secrets and (sighting.address, sighting.port) not in known
    ][:_MAX_UNKNOWN]
    dials = [
        prober.dial(sighting.address, sighting.port, secrets[sighting.tag], None) for sighting in sightings
    ]
    unknown, own = await asyncio.gather(asyncio.gather(*dials), prober.dial_node(agent.me))
    return (*unknown, *own)


def _peer_rows(agent: Agent, peers: dict[NodeId, PeerFacts]) -> Iterator[CheckRow]:
    machine = agent.machine_of(agent.me)
    torch = (machine.torch or "") if machine is not None else ""
    here = LocalFacts(agent.name, agent.listener.port, _OS, __version__, torch)
    for peer in peers.values():
        rows = (
            checks.reach(peer, here),
            checks.interface(peer),
            checks.versions(peer, here),
            checks.clock(peer),
            checks.fork(peer),
        )
        yield from (row for row in rows if row is not None)


def _cluster_rows(agent: Agent, peers: Iterable[PeerFacts], dials: list[DialResult]) -> Iterator[CheckRow]:
    now = asyncio.get_running_loop().time()
    health = agent.discovery.discovery.health()
    yield from checks.discovery(health)
    paths = [path for peer in peers for path in peer.paths]
    row = checks.local_network(_OS, health.get("mdns") is not None, paths)
    if row is not None:
        yield row
    names = {node.raw: agent.name_of(node) for node in agent.log.members}
    yield checks.cloned_key(agent.me.raw, agent.incarnation, dials, names)
    standing = agent.member.quorum_status(now)
    voters = len(agent.member.view.voters)
    needed = tuple(agent.name_of(NodeId(raw)) for raw in standing.needed)
    yield checks.quorum(standing.decides, voters - len(standing.missing), voters, needed)
    row = checks.notifications(agent.notifications.problem, has_targets=agent.notifications.has_targets)
    if row is not None:
        yield row
    pauses = [float(match[1]) for event in agent.events if (match := _ASLEEP.search(event))]
    yield checks.stalls(tuple(pauses), now - agent.started)


def _facts(agent: Agent, node: NodeId, collected: _Collected, interfaces: list[Interface]) -> PeerFacts:
    known, link = agent.peer_store[node], agent.connections.get(node)
    peer = agent.member.peers.get(node.raw)
    machine = agent.machine_of(node)
    differs = (
        agent.member.history.differs_from(peer.beat) if peer is not None and peer.beat is not None else None
    )
    return PeerFacts(
        name=agent.name_of(node),
        port=known.port or agent.settings.network.port,
        os=machine.os if machine is not None else "",
        version=known.version,
        torch=(machine.torch or "") if machine is not None else "",
        in_view=agent.member.view.of(node.raw) is not None,
        linked=link is not None,
        link_address=link.address if link is not None else "",
        link_inbound=link is not None and not link.outbound,
        paths=tuple(_path(dial, interfaces) for dial in collected.dials),
        dial_backs=collected.dial_backs,
        dial_back_failure=collected.dial_back_failure,
        failure=agent.connections.failure(node),
        clock_ahead_s=collected.clock_ahead_s,
        fork=differs,
        heard_by=_heard_by(agent, node),
    )


def _heard_by(agent: Agent, node: NodeId) -> tuple[str, ...]:
    """Return the members that watch this machine and hear its heartbeats."""
    now = asyncio.get_running_loop().time()
    members = agent.member.view.nodes
    if node.raw not in members:
        return ()
    names = []
    for raw, peer in agent.member.peers.items():
        missed = peer.suspects(now)
        if raw == node.raw or raw not in members or missed is None or peer.is_suspect(now):
            continue
        if node.raw in watched(members, raw) and node.raw not in missed:
            names.append(agent.name_of(NodeId(raw)))
    return tuple(names[:3])


def _in_order(agent: Agent) -> list[NodeId]:
    """Return all other machines, those without a connection first."""
    others = [node for node in agent.log.members if node != agent.me]
    return sorted(others, key=lambda node: agent.connections.get(node) is not None)


def _path(dial: DialResult, interfaces: list[Interface]) -> DialPath:
    near = leading_to(dial.address, interfaces)
    if near is not None:
        return DialPath(dial, near, direct=near.kind != "loopback")
    return DialPath(dial, by_address(interfaces).get(_source_for(dial.address)), direct=False)


def _source_for(address: str) -> str:
    """Return the local address on the route to an address; sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def own_interfaces() -> list[Interface]:
    """Return every address of this machine with the kind of its interface."""
    ports: dict[str, str] = {}
    if sys.platform == "darwin":
        ports = hardware_ports(runner(_COMMAND_S)(["networksetup", "-listallhardwareports"]).stdout)
    is_up = interface_states()
    interfaces = []
    for name, entries in psutil.net_if_addrs().items():
        kind = kind_of(name, ports.get(name, ""), wireless=Path(f"/sys/class/net/{name}/wireless").exists())
        for entry in entries:
            if is_up(name) and entry.family in (socket.AF_INET, socket.AF_INET6) and entry.netmask:
                address = entry.address.partition("%")[0]
                interfaces.append(Interface(name, address, prefix_of(entry.netmask), kind))
    return interfaces


def prefix_of(netmask: str) -> int:
    """Return the prefix length of a netmask. Pure."""
    family = socket.AF_INET6 if ":" in netmask else socket.AF_INET
    try:
        return int.from_bytes(socket.inet_pton(family, netmask.partition("/")[0])).bit_count()
    except OSError:
        return 128 if family == socket.AF_INET6 else 32


def _all_dials(results: Iterable[_Collected]) -> Iterator[DialResult]:
    for collected in results:
        yield from collected.dials


def _is_good(task: asyncio.Future[T]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
