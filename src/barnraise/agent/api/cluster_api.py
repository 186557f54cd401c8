"""API handlers for the cluster: status, pairing, renaming, removal, shutdown."""

from __future__ import annotations

import asyncio
import os
from typing import Literal

from barnraise import __version__
from barnraise.agent.api import history_api, notify_api, queue_api, runs_api
from barnraise.agent.api.run_interface import refuse_request
from barnraise.agent.cluster.admission import rotate_key
from barnraise.agent.cluster.join import join
from barnraise.agent.cluster.machine_names import name_clash, name_clashes
from barnraise.agent.daemon import Agent
from barnraise.agent.diagnostics import collect
from barnraise.agent_client.cluster_requests import (
    AgentRequest,
    AgentResponse,
    AnyAgentRequest,
    CheckRequest,
    CleanRequest,
    ContinueRequest,
    DeviceRow,
    JoinClusterRequest,
    LeaveRequest,
    LimitsRequest,
    LimitsResponse,
    MeasureRequest,
    NodeRow,
    OfferRequest,
    OfferResponse,
    OpenPageRequest,
    PairRequest,
    PauseMachineRequest,
    PeerLinkRow,
    PskRequest,
    RenameRequest,
    RequestDone,
    RotateKeyRequest,
    ShutdownRequest,
    StatusRequest,
    StatusResponse,
    UnpairRequest,
    decode_request,
    encode,
)
from barnraise.agent_client.history.requests import HistoryRequest
from barnraise.agent_client.kv_messages import ClusterRequest, KvRequest, KvResponse, Result
from barnraise.agent_client.kv_messages import encode as encode_kv
from barnraise.agent_client.machine_limits import MachineLimits
from barnraise.agent_client.metrics.requests import HealthRequest, MetricsReport, MetricsRequest
from barnraise.agent_client.notifications.requests import NotificationRequest
from barnraise.agent_client.queue.requests import QueueRequest
from barnraise.agent_client.run_requests import GraphRequest, RunRequest
from barnraise.core.errors import AgentError, MembershipError
from barnraise.identity import NodeId
from barnraise.identity.trust import SignedEntry, TrustLog, check_name
from barnraise.kvstore.journals import refuse_journal_operation
from barnraise.membership.consensus.paxos import BRANCH_BITS
from barnraise.pairing import grant_text, new_psk
from barnraise.topology import Machine, TopologyGraph
from barnraise.topology.graph import ordered_pair
from barnraise.topology.render import draw_graph

_PERSON = "this machine's user"  # at the local interface

State = Literal["this", "here", "joining", "silent", "away"]


async def answer(agent: Agent, data: bytes, run: str) -> bytes:
    """Answer one request of a process of this machine's user.

    ``run``: the run whose local interface received it; empty for the interface of the person.
    """
    request = decode_request(data)
    if run:
        _check_worker_request(agent, run, request)
        if isinstance(request, GraphRequest):
            return encode(runs_api.graph_of_run(agent, run))
    if isinstance(request, KvRequest) and request.durable:
        return encode_kv(KvResponse(await _answer_journal(agent, request)))
    if isinstance(request, KvRequest | ClusterRequest):
        if isinstance(request, KvRequest) and agent.runs.proxy.is_needed:
            return encode_kv(
                KvResponse(await agent.runs.proxy.request(request.operation, request.patience_s))
            )
        return await agent.kv.answer(request)
    if isinstance(request, HealthRequest):
        return encode(agent.metrics.health(is_for_worker=bool(run)))
    if isinstance(request, MetricsReport):
        agent.metrics.received(request)
        return encode(RequestDone(""))
    if isinstance(request, HistoryRequest):
        return encode(await history_api.answer(agent, request))
    if isinstance(request, QueueRequest):
        return encode(await queue_api.answer(agent, request))
    if isinstance(request, NotificationRequest):
        return encode(await notify_api.answer(agent, request))
    if isinstance(request, RunRequest):
        return encode(await runs_api.answer(agent, request))
    return encode(await _answer(agent, request))


async def _answer_journal(agent: Agent, request: KvRequest) -> Result:
    """Execute an operation on a journal; raise AgentError if it is none, or if this machine is a guest."""
    reason = refuse_journal_operation(request.operation)
    if reason is not None:
        raise AgentError(f"the agent rejects a request to a journal: {reason}", hint="Correct the name.")
    if agent.log.role(agent.me) != "owner":
        raise AgentError(
            "this machine is a guest of its cluster, and guests have no journals",
            hint="Run the sweep on machines that `barnraise nodes` shows as owner: barnraise run --on NAMES.",
        )
    return await agent.journals.request(request.operation, request.patience_s)


def _check_worker_request(agent: Agent, run: str, request: AnyAgentRequest) -> None:
    """Raise AgentError unless a worker of this run may send this request."""
    entry = agent.runs.registry.runs.get(run)
    earlier = entry.spec.resumes if entry is not None else ()
    reason = refuse_request(run, earlier, request)
    if reason is not None:
        raise AgentError(
            f"the agent rejects {type(request).__name__} of a worker of run {run}: {reason}",
            hint="Do it in a terminal, outside of the run.",
        )


async def _answer(agent: Agent, request: AgentRequest) -> AgentResponse:
    match request:
        case StatusRequest():
            return status(agent)
        case MetricsRequest():
            return await agent.metrics.answer()
        case PairRequest():
            _check_owner(agent, "pair another machine")
            agent.pairing.open_code(request.role)
            agent.audit.write("code-opened", by=_PERSON, detail=f"for the role {request.role}")
            agent.discovery.update_tags()
            return _offer(agent)
        case OfferRequest():
            if request.withdraw and agent.pairing.offer is not None:
                agent.pairing.offer.withdraw()
            return _offer(agent)
        case JoinClusterRequest():
            return RequestDone(await join(agent, request))
        case UnpairRequest():
            return RequestDone(await _unpair(agent, request.node))
        case RenameRequest():
            check_name(request.name)
            agent.rename(request.name)
            return RequestDone(f"this machine is now called {request.name}")
        case RotateKeyRequest():
            return RequestDone(await _rotate_key(agent))
        case ContinueRequest():
            return RequestDone(await _continue(agent, list(request.without)))
        case PskRequest():
            _check_owner(agent, "make a pre-shared key")
            psk = new_psk(request.role)
            agent.pairing.use_psk(psk)
            agent.audit.write(
                "psk-made", subject=psk.tag.hex(), by=_PERSON, detail=f"for the role {psk.role}"
            )
            return RequestDone(
                f"machines with this key are admitted as {psk.role} while this agent runs", str(psk)
            )
        case MeasureRequest():
            agent.link_prober.measure_now()
            return RequestDone("the links of this machine will be measured again, one after the other")
        case CheckRequest():
            return await collect.check(agent, agent.reachability)
        case CleanRequest():
            return await agent.cleaner.clean(request)
        case LimitsRequest():
            return _limits(agent, request.limits)
        case PauseMachineRequest():
            node = agent.find(request.machine)
            if node != agent.me:
                _check_owner(agent, "pause other machines")
            order = agent.remote_pause.order(node, paused=request.paused, until=request.until)
            return RequestDone(await order)
        case OpenPageRequest():
            return await agent.page.open(request.machine)
        case LeaveRequest():
            agent.audit.write("cluster-left", subject=agent.cluster_name, by=_PERSON)
            agent.leaves_cluster = True
            agent.stop_requested.set()
            return RequestDone(_left_text(agent))
        case ShutdownRequest():
            agent.stop_requested.set()
            return RequestDone("the agent is stopping")
        case _:
            raise AgentError(f"the agent does not support the request {type(request).__name__}")


def _limits(agent: Agent, wanted: MachineLimits | None) -> LimitsResponse:
    """Change the limits of this machine if asked, and return them with what they mean for its runs."""
    service = agent.limits
    if wanted is not None:
        service.set(wanted)
    effects = agent.runs.pause_effects()
    return LimitsResponse(limits=service.limits, reason=service.shown_reason, runs=effects)


def _left_text(agent: Agent) -> str:
    text = "this machine has left its cluster; `barnraise up` starts it as a new machine"
    if len(agent.log.members) > 1 and not agent.removed_by:
        text += f".\nThe others still list it. On one of them: barnraise unpair {agent.name_of(agent.me)}"
    return text


def _check_owner(agent: Agent, what: str) -> None:
    if agent.log.role(agent.me) != "owner":
        raise AgentError(
            f"this machine is a guest and cannot {what}",
            hint="Do it on a machine that `barnraise nodes` shows as owner.",
        )


def _offer(agent: Agent) -> OfferResponse:
    offer = agent.pairing.offer
    if offer is None:
        return OfferResponse("none", "No code is open.")
    now = asyncio.get_running_loop().time()
    state = offer.state(now)
    joined = agent.pairing.joined
    granted = ""
    if joined is not None:
        clash = name_clash(joined, agent.named_machines(), agent.me)
        granted = grant_text(offer.role, "offerer", agent.name_of(joined), clash=clash)
    return OfferResponse(
        state="joined" if granted else state,
        sentence=offer.sentence(now),
        code=str(offer.secret) if state == "open" else "",
        role=offer.role,
        seconds_left=offer.seconds_left(now),
        granted=granted,
    )


async def _rotate_key(agent: Agent) -> str:
    if agent.log.role(agent.me) != "owner":
        raise AgentError(
            "this machine is a guest and cannot change its key in place",
            hint="Run `barnraise leave` and `barnraise up` here, pair again, and unpair the old id.",
        )
    old, new = agent.me.short, await rotate_key(agent)
    agent.audit.write("identity-changed", subject=new.short, by=_PERSON, detail=f"the key {old} was replaced")
    agent.changes_key = True
    agent.stop_requested.set()
    return f"this machine has a new key: {new.short} instead of {old}; the agent starts again with it"


async def _unpair(agent: Agent, text: str) -> str:
    _check_owner(agent, "remove another")
    node = agent.find(text, exact=True)
    name = agent.name_of(node)
    if node == agent.me:
        raise MembershipError(
            "a machine cannot remove itself",
            hint="Run `barnraise unpair` on another owner's machine, or only `barnraise down` here.",
        )
    standing = agent.member.quorum_status(asyncio.get_running_loop().time())
    if not standing.decides and node.raw in standing.needed:
        agent.continue_without([node])  # the user confirms that it does not return

    def entry(log: TrustLog) -> SignedEntry | None:
        current = log.current(node)  # it may have changed its key meanwhile
        return None if log.role(current) is None else log.revoke(agent.key, current)

    try:
        await agent.commit_entry(entry)
    finally:
        agent.continue_without([])
    return (
        f"{name} ({node.short}) is removed permanently; the cluster's secret was changed{_uninformed(agent)}"
    )


def _uninformed(agent: Agent) -> str:
    """Return a sentence about the owners' machines that do not know of the last removal yet."""
    online = set(agent.member.view.nodes)
    away = [agent.name_of(node) for node in agent.log.owners if node.raw not in online]
    if not away:
        return ""
    verb = "are off and do" if len(away) > 1 else "is off and does"
    start = "Start them" if len(away) > 1 else "Start it"
    return f".\n{', '.join(away)} {verb} not know it yet. {start} while this machine is on"


async def _continue(agent: Agent, texts: list[str]) -> str:
    _check_owner(agent, "decide for the cluster")
    nodes = [agent.find(text, exact=True) for text in texts]
    now = asyncio.get_running_loop().time()
    dead = agent.member.dead(now)
    for node in nodes:
        if node.raw not in dead and agent.connections.get(node) is not None:
            raise MembershipError(
                f"{agent.name_of(node)} is online", hint="--without accepts only machines that are offline."
            )
    before = agent.member.record.decided.position
    names = ", ".join(map(agent.name_of, nodes))
    agent.audit.write("branch-opened", subject=agent.cluster_name, by=_PERSON, detail=f"without {names}")
    agent.continue_without(nodes)
    for _ in range(50):
        if agent.member.record.decided.position > before:
            return f"the cluster continues without {names}"
        await asyncio.sleep(0.1)
    agent.continue_without([])  # an unused permission must not take effect later
    raise MembershipError(f"still no majority: {agent.blocked_reason()}")


def status(agent: Agent) -> StatusResponse:
    """Return the state of the cluster as this machine sees it."""
    now = asyncio.get_running_loop().time()
    first, why = agent.member.coordinator(now)
    standing = agent.member.quorum_status(now)
    decided = agent.member.record.decided
    graph = agent.link_prober.graph()
    rows = tuple(_row(agent, graph, node, first, now) for node in _in_order(agent))
    offer = agent.pairing.offer
    return StatusResponse(
        cluster=agent.cluster_name,
        branch=decided.branch >> BRANCH_BITS,
        view=decided.number,
        member=agent.member.is_member,
        decides=standing.decides,
        sentence=agent.blocked_reason() or _sentence(rows),
        coordinator=agent.name_of(NodeId(first)) if first is not None else "",
        why_coordinator=why,
        nodes=rows,
        links=_link_rows(graph),
        picture=draw_graph(graph),
        port=agent.listener.port,
        pid=os.getpid(),
        encryption=agent.settings.network.encryption,
        version=__version__,
        offer=offer.sentence(now) if offer is not None and offer.open_at(now) else "",
        recent=tuple(list(agent.events)[-8:]),
        name_clashes=tuple(name_clashes(agent.named_machines(), agent.me)),
        up_s=now - agent.started,
        disk=agent.cleaner.disk,
    )


def _in_order(agent: Agent) -> list[NodeId]:
    """Return the members by seniority, then the other machines in the order of their admission."""
    present = [NodeId(raw) for raw in agent.member.view.nodes]
    return [*present, *(node for node in agent.log.members if node not in present)]


def _row(agent: Agent, graph: TopologyGraph, node: NodeId, first: bytes | None, now: float) -> NodeRow:
    listed = agent.log.members.get(node)
    member = agent.member.view.of(node.raw)
    order = agent.member.view.nodes
    link, choice = agent.connections.get(node), agent.connections.choice(node)
    known = agent.peer_store[node]
    machine = agent.machine_of(node)
    measured = graph.link(*ordered_pair(agent.me.raw.hex(), node.raw.hex())) if node != agent.me else None
    trip = agent.round_trip(node)
    return NodeRow(
        node=str(node),
        short=node.short,
        name=agent.name_of(node),
        role=listed.role if listed is not None else "guest",
        state=_state(agent, node, now),
        seniority=order.index(node.raw) + 1 if member is not None else None,
        coordinator=node.raw == first,
        votes=member.votes if member is not None else False,
        works=member.works if member is not None else True,
        address=link.address if link is not None else "",
        why_address=choice.reason if choice is not None else agent.connections.failure(node),
        rtt_ms=round(trip[0] * 1e3, 3) if trip is not None else None,
        mbps=round(measured.mbps, 1) if measured is not None and measured.mbps is not None else None,
        os=f"{machine.os} {machine.arch}" if machine is not None else "",
        python=machine.python if machine is not None else "",
        torch=machine.torch or "" if machine is not None else "",
        devices=_devices(machine),
        notes=machine.notes if machine is not None else (),
        version=__version__ if node == agent.me else known.version,
        runs=agent.runs.registry.at_work(node),
        paused=agent.limits.shown_reason if node == agent.me else known.paused,
    )


def _state(agent: Agent, node: NodeId, now: float) -> State:
    if node == agent.me:
        return "this" if agent.member.is_member else "joining"
    member = agent.member.view.of(node.raw)
    if member is None:
        return "joining" if agent.connections.get(node) is not None else "away"
    peer = agent.member.peers.get(node.raw)
    if peer is None or peer.is_suspect(now):
        return "silent"
    return "here" if peer.beat is not None else "joining"


def _sentence(rows: tuple[NodeRow, ...]) -> str:
    online = sum(row.state in ("this", "here") for row in rows)
    silent = [row.name for row in rows if row.state == "silent"]
    away = [row.name for row in rows if row.state == "away"]
    parts = [f"{online} of {len(rows)} machines are online" if len(rows) > 1 else "this machine is alone"]
    if silent:
        parts.append(f"{', '.join(silent)} does not answer")
    if away:
        parts.append(f"{', '.join(away)} {'is' if len(away) == 1 else 'are'} away")
    return "; ".join(parts)


def _devices(machine: Machine | None) -> tuple[DeviceRow, ...]:
    if machine is None:
        return ()
    return tuple(
        DeviceRow(device.kind, device.name, device.memory_bytes, device.tflops_fp32, device.memory_gbps)
        for device in machine.devices
    )


def _link_rows(graph: TopologyGraph) -> tuple[PeerLinkRow, ...]:
    names = {facts.node: facts.name for facts in graph.nodes}
    return tuple(
        PeerLinkRow(names[link.a], names[link.b], round(link.rtt_s * 1e3, 3), link.mbps, link.address)
        for link in graph.links
    )
