"""Attacks by guests of the cluster: their keys and links are valid, their messages are not.

Run by ``benchmarks.attacks.tools``. A guest may announce that it lives, and its addresses. A guest decides
nothing and speaks only for itself; its statements about others are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from barnraise.agent import protocol
from barnraise.agent.cluster import link_probe
from barnraise.agent.diagnostics.reachability import (
    DialBackReply,
    DialBackRequest,
    decode_dial_back,
    encode_dial_back,
)
from barnraise.agent.limits.messages import PauseAnswer, PauseOrder
from barnraise.agent.limits.messages import encode as encode_pause
from barnraise.agent.page.messages import OwnerRequest
from barnraise.agent.page.messages import encode as encode_owner
from barnraise.agent_client.cluster_requests import LimitsRequest, PauseMachineRequest
from barnraise.agent_client.cluster_requests import encode as encode_request
from barnraise.agent_client.kv_messages import LOBBY, Namespace, PushToQueue
from barnraise.agent_client.machine_limits import MachineLimits
from barnraise.agent_client.run_requests import RunsRequest, StopRunRequest
from barnraise.core.errors import BarnraiseError
from barnraise.identity import NodeId, NodeKey, delegate
from barnraise.identity.trust import AdmitMember, RevokeMember, TrustLog, _signed, decode_entry, encode_entry
from barnraise.kvstore.messages import ForwardedRequest, ResendRequest, encode_message
from barnraise.membership.consensus.certificate import CertifiedDecision, vote_text
from barnraise.membership.consensus.paxos import (
    PaxosAccept,
    PaxosAccepted,
    PaxosBallot,
    PaxosDecision,
    PaxosPrepare,
    PaxosPromise,
    PaxosReject,
)
from barnraise.membership.messages import (
    CatchUpRequest,
    DecisionMessage,
    Goodbye,
    Heartbeat,
    Message,
    TrustProposal,
)
from barnraise.membership.view import MembershipView, PresentMember, decide, read_view
from barnraise.topology import LinkFacts
from barnraise.transport.control.agent_tls import AGENT_RUN, AgentTls
from barnraise.transport.control.dial import ControlConnection, DialOptions, dial_unopened
from barnraise.transport.control.framing import ControlFrameKind, encode_control
from barnraise.transport.listener.preface import ROUTE_AGENT, ROUTE_AGENT_BULK, target_of
from benchmarks.attacks.tools.toolbox import READY, Result, tool

_BEAT_S = 0.3
_STALLED_S = 1.2
SELVES = 8  # so often a guest becomes another one
_CUT_S = 30.0  # a cut comes at once, but an agent may stand still
_HUGE = 2**53
_SCAN_PAUSE_S = 5.5  # an agent dials back for each machine every 3 s, and waits 2 s for an answer

Agents = Sequence[tuple[str, int, str]]
Lie = Callable[[], dict[str, Any]]


class Guest:
    """A guest without an agent: it sends correct heartbeats, except for the fields that it forges."""

    def __init__(self, keep: str, agents: Agents) -> None:
        self.key = NodeKey.load_or_create(Path(keep) / "key")
        lines = (Path(keep) / "log").read_text().split()
        self.log = TrustLog.read(decode_entry(bytes.fromhex(line)) for line in lines)
        self.agents = {NodeId(bytes.fromhex(node)): (host, port) for host, port, node in agents}
        self.incarnation = os.urandom(16)
        self.links: dict[NodeId, ControlConnection] = {}
        self.heard: dict[NodeId, Heartbeat] = {}
        self.members: tuple[bytes, ...] = ()
        credentials = delegate(self.key, run=AGENT_RUN, worker=self.incarnation)
        self.tls = AgentTls(credentials, lambda: self.agents)
        self.dialled = 0
        self.lies: Lie = dict
        self.stalled = 0  # how often it stood still for so long that others may think it dead
        self._beaten_at: float | None = None
        self._serials = itertools.count(1)

    @property
    def me(self) -> PresentMember:
        return PresentMember(self.key.id.raw, self.incarnation, votes=False)

    async def dial(self, node: NodeId, route: int = ROUTE_AGENT) -> ControlConnection:
        host, port = self.agents[node]
        self.dialled += 1
        options = DialOptions(route, target_of(node), self.log.secret, self.tls, expect=node)
        link = await dial_unopened(host, port, options)
        link.begin(self._received, lambda link, why: None)
        return link

    def _received(self, link: ControlConnection, message: bytes) -> None:
        if message[:1] == protocol.MEMBERSHIP:
            decoded = protocol.decode_membership(message[1:])
            if isinstance(decoded, Heartbeat):
                self.heard[link.peer.node] = decoded
            elif isinstance(decoded, DecisionMessage):
                self.members = read_view(decoded.links[-1].decision).nodes

    async def enter(self) -> None:
        """Enter the view like an honest guest."""
        for _ in range(600):
            await self.live(0.1, 0.1)
            if self.key.id.raw in self.members:
                return

    async def live(self, seconds: float, pause_s: float = _BEAT_S) -> None:
        """Send heartbeats, with the current lies, for some seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            self.stalled += self._beaten_at is not None and loop.time() - self._beaten_at > _STALLED_S
            self._beaten_at = loop.time()
            for node in self.agents:
                words = self._beat(node)
                await self.say(node, [] if words is None else [words])
            await asyncio.sleep(pause_s)

    def _beat(self, node: NodeId) -> bytes | None:
        """Return the heartbeat for this agent, or None before the agent has sent its first heartbeat."""
        heard = self.heard.get(node)
        if heard is None:
            return None
        honest = Heartbeat(
            me=self.me,
            serial=next(self._serials),
            echo=heard.serial,
            held_us=0,
            branch=heard.branch,
            number=heard.number,
            view=heard.view,
            log_length=heard.log_length,
            log_head=heard.log_head,
        )
        return protocol.encode_membership(msgspec.structs.replace(honest, **self.lies()))

    async def say(self, node: NodeId, messages: Iterable[bytes]) -> None:
        """Send messages over the link to this agent, and connect again if the link was cut."""
        try:
            link = self.links.get(node)
            if link is None or link.closed is not None:
                link = self.links[node] = await self.dial(node)
            for message in messages:
                link.send(message)
                if link.queued > 1 << 20:
                    await link.drain(5.0)
                if link.closed is not None:
                    return
        except BarnraiseError:
            await asyncio.sleep(0.05)

    async def leave(self) -> None:
        self.lies = dict
        for node in self.agents:
            await self.say(node, [protocol.encode_membership(Goodbye(self.incarnation))])
        await asyncio.sleep(0.5)
        for link in self.links.values():
            link.close("it leaves")


@tool
async def guest_decides(keep: str, agents: Agents, friend: str, times: int) -> Result:
    """Send messages that only an owner may send: propose, vote, announce, admit a friend, remove others."""
    guest = Guest(keep, agents)
    await guest.enter()
    for _ in range(times):
        for node in guest.agents:
            words = _decisions(guest, node, bytes.fromhex(friend))
            await guest.say(node, map(protocol.encode_membership, words))
        await guest.live(0.01, 0.01)
    for node in guest.agents:
        await guest.say(node, [protocol.REMOVED])
    await guest.live(1.0)
    await guest.leave()
    return {"dialled": guest.dialled, "stalled": guest.stalled}


def _decisions(guest: Guest, node: NodeId, friend: bytes) -> list[Message]:
    heard, key, log = guest.heard[node], guest.key, guest.log
    ballot = PaxosBallot(_HUGE, key.id.raw)
    alone = MembershipView(
        (PresentMember(key.id.raw, guest.incarnation, votes=True),), len(log), (), why="because I say so"
    )
    coup = decide(PaxosDecision(heard.branch, heard.number, bytes(32), (), b""), heard.view, alone)
    branch = msgspec.structs.replace(coup, branch=heard.branch + 1)
    admits = _signed(key, len(log), log.head, AdmitMember(node=friend, role="owner", name="friend"))
    removes = _signed(key, len(log), log.head, RevokeMember(node=node.raw, secret=os.urandom(32)))
    return [
        PaxosPrepare(heard.view, ballot),
        PaxosPromise(heard.view, ballot, None),
        PaxosAccept(ballot, coup),
        PaxosAccepted(heard.view, ballot, key.sign(vote_text(coup.digest, ballot))),
        PaxosReject(heard.view, ballot, ballot),
        DecisionMessage((CertifiedDecision(coup),)),
        DecisionMessage((CertifiedDecision(branch),), 0, tuple(map(encode_entry, log.entries))),
        CatchUpRequest(0),
        TrustProposal(encode_entry(admits)),
        TrustProposal(encode_entry(removes)),
    ]


@tool
async def guests_lie(keeps: Sequence[str], agents: Agents, away: str, lie: str, cue: str) -> Result:
    """Send one kind of false heartbeat from several guests until the file ``cue`` exists."""
    guests = [Guest(keep, agents) for keep in keeps]
    await _together(guest.enter() for guest in guests)
    for guest in guests:
        guest.lies = _lie(guest, bytes.fromhex(away), lie)
    READY.get()()
    pause = {"another history": 0.05, "another self": 0.2}.get(lie, _BEAT_S)
    for _ in range(240):
        await _together(guest.live(0.5, pause) for guest in guests)
        if Path(cue).exists():
            break
    await _together(guest.leave() for guest in guests)
    return {
        "dialled": sum(guest.dialled for guest in guests),
        "stalled": sum(guest.stalled for guest in guests),
    }


def _lie(guest: Guest, away: bytes, lie: str) -> Lie:
    owners = tuple(node.raw for node in guest.agents)
    stranger = PresentMember(os.urandom(32), os.urandom(16))
    again = tuple(PresentMember(node, os.urandom(16)) for node in owners)
    visitors = (stranger, PresentMember(away, os.urandom(16)), *again)
    turns = itertools.count()
    histories: list[dict[str, Any]] = [
        {"number": _HUGE, "view": os.urandom(32), "log_length": 4096},
        {},
        {"branch": _HUGE, "log_length": 4096, "log_head": os.urandom(32)},
        {"view": os.urandom(32)},
        {},
        {"log_head": os.urandom(32), "log_length": 1},
    ]
    masks = [*owners[1:], away, stranger.node]

    def other_self() -> dict[str, Any]:
        # To each agent the same, and for longer than one that gathers arrivals waits.
        turn = min(next(turns) // len(owners), SELVES)
        return {"me": msgspec.structs.replace(guest.me, works=bool(turn % 2))}

    kinds: dict[str, Lie] = {
        "one is dead": lambda: {"suspects": owners[1:2]},
        "all are dead": lambda: {"suspects": tuple(sorted(owners))},
        "visitors": lambda: {"visitors": visitors},
        "another history": lambda: histories[next(turns) % len(histories)],
        "another name": lambda: {"me": PresentMember(masks[next(turns) // 12 % len(masks)], os.urandom(16))},
        "another self": other_self,
        "another time": lambda: {"held_us": _HUGE, "echo": _HUGE},
    }
    return kinds[lie]


@tool
async def guest_babbles(keep: str, agents: Agents, times: int) -> Result:
    """Send messages that no agent sends: unknown kinds, deep nesting, wrong lengths.

    Each message closes the link, and the guest connects again.
    """
    guest = Guest(keep, agents)
    deep = b"\x91" * 100_000 + b"\xc0"
    kinds = (
        protocol.MEMBERSHIP,
        protocol.GREETING,
        protocol.TRAIN,
        protocol.SURVEY,
        protocol.BOARD,
        protocol.JOURNAL,
    )
    words = [b"", b"\x00", b"zzz", *(kind + deep for kind in kinds), *kinds]
    words += [kind + b"\xff" * 200 for kind in kinds]
    entry = PushToQueue(Namespace("default", LOBBY), bytes(16), 1, b"", "ab" * 16, b"{}")
    for message in (ForwardedRequest(bytes(16), 1, entry), ResendRequest(1)):  # lawful, but not of a guest
        words += [kind + encode_message(message) for kind in (protocol.BOARD, protocol.JOURNAL)]
    frames = [encode_control(ControlFrameKind.MESSAGE, word) for word in words]
    frames += [struct.pack("<IB", 2**31, 0), struct.pack("<IB", 2**32 - 1, 1), struct.pack("<IB", 5, 77)]
    frames += [encode_control(ControlFrameKind.OPEN, bytes(7))]
    left_open = 0
    for _ in range(times):
        for frame in frames:
            ends = await asyncio.gather(*(_is_cut_for(guest, node, frame) for node in guest.agents))
            left_open += ends.count(False)
    return {"said": times * len(frames), "left_open": left_open}


async def _is_cut_for(guest: Guest, node: NodeId, frame: bytes) -> bool:
    link = await guest.dial(node)
    assert link._transport is not None
    link._transport.write(link._session.encrypt(frame))
    if await is_closed(link):
        return True
    link.close("it took it")
    return False


async def is_closed(link: ControlConnection) -> bool:
    """Return True if the other side closes the link before long."""
    end = asyncio.get_running_loop().time() + _CUT_S
    while link.closed is None and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.01)
    return link.closed is not None


@tool
async def guest_links(keep: str, agents: Agents, links: int) -> Result:
    """Open ever more links with one key."""
    guest = Guest(keep, agents)
    await guest.enter()
    opened: list[ControlConnection] = []
    for _ in range(links):
        with contextlib.suppress(BarnraiseError):
            opened += await asyncio.gather(*map(guest.dial, guest.agents))
        await guest.live(0.01, 0.01)
    await guest.live(1.5)
    still = sum(link.closed is None for link in opened)
    for link in opened:
        link.close("over")
    await guest.leave()
    return {"opened": len(opened), "open_still": still, "stalled": guest.stalled}


@tool
async def guest_measures(keep: str, agents: Agents, crumbs: int) -> Result:
    """Send a link measurement in tiny pieces, unrequested receipts, and false figures of other links."""
    guest = Guest(keep, agents)
    await guest.enter()
    victim, names = next(iter(guest.agents)), sorted(node.raw.hex() for node in guest.agents)
    facts = [LinkFacts(a=a, b=b, rtt_s=99.0, mbps=0.1) for a, b in itertools.combinations(names, 2)]
    crumb = link_probe._encode(link_probe.ProbeChunk(7, b"x"))
    strange = [
        link_probe._encode(link_probe.ProbeReceipt(1, 1)),
        link_probe._encode(link_probe.LinkReport(tuple(facts))),
    ]
    for _ in range(crumbs // 500):
        await guest.say(victim, [crumb] * 500 + strange)
        with contextlib.suppress(BarnraiseError):
            await guest.links[victim].ping(5.0)  # no faster than it is taken
        await guest.live(0.001, 0.001)
    await guest.live(0.5)
    await guest.leave()
    return {"dialled": guest.dialled, "stalled": guest.stalled}


@tool
async def guest_greets(keep: str, agents: Agents, names: int) -> Result:
    """Send greetings with ever new names, which agents store on disk; some contain terminal control codes."""
    guest = Guest(keep, agents)
    await guest.enter()
    addresses = tuple(f"192.0.2.{number}" for number in range(16))
    for number in range(names):
        name = f"\x1b[31mh{number}\x07" if number % 4 == 3 else f"guest {number}"
        greeting = protocol.encode_hello(protocol.PeerHello(name, "9.9", addresses, 9, 4096))
        for node in guest.agents:
            await guest.say(node, [greeting])
        await guest.live(0.01, 0.01)
    await guest.live(1.0)
    await guest.leave()
    return {"dialled": guest.dialled, "stalled": guest.stalled}


class ScanningGuest(Guest):
    """A guest that collects what agents tell it about addresses that they dialled for it."""

    def __init__(self, keep: str, agents: Agents) -> None:
        super().__init__(keep, agents)
        self.told: list[tuple[str, str, str]] = []

    def _received(self, link: ControlConnection, message: bytes) -> None:
        if message[:1] != protocol.SURVEY:
            super()._received(link, message)
            return
        reply = decode_dial_back(message[1:])
        if isinstance(reply, DialBackReply):
            self.told.extend((result.address, result.outcome, result.words) for result in reply.results)


@tool
async def guest_scans(keep: str, agents: Agents, victim: str, ports: Sequence[int]) -> Result:
    """Send greetings with another machine's address and each port, and ask the agents to dial it."""
    guest = ScanningGuest(keep, agents)
    await guest.enter()
    epoch = len(guest.log.secrets)
    for port in ports:
        greeting = protocol.encode_hello(protocol.PeerHello("guest", "9.9", (victim,), port, epoch))
        for node in guest.agents:
            await guest.say(node, [greeting, encode_dial_back(DialBackRequest(port))])
        await guest.live(_SCAN_PAUSE_S)
    await guest.leave()
    return {"told": guest.told, "dialled": guest.dialled, "stalled": guest.stalled}


async def _together(works: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*works)


class AskingGuest(Guest):
    """A guest that counts answers to its requests."""

    answers = 0

    def _received(self, link: ControlConnection, message: bytes) -> None:
        self.answers += message[:1] in (protocol.OWNER, protocol.PAUSE)
        super()._received(link, message)


@tool
async def guest_asks_as_owner(keep: str, agents: Agents, run: str) -> Result:
    """Send requests that only owners' machines may send, each on a link of its own."""
    guest = AskingGuest(keep, agents)
    requests = (RunsRequest(), StopRunRequest(run, hard=True), LimitsRequest(MachineLimits(paused=True)))
    sent = 0
    for node in guest.agents:
        for request in requests:
            link = await guest.dial(node, ROUTE_AGENT_BULK)
            link.send(encode_owner(OwnerRequest(sent, encode_request(request))))
            sent += 1
            await asyncio.sleep(1.0)
            link.close("done")
    return {"sent": sent, "told": guest.answers}


@tool
async def guest_pauses_others(keep: str, agents: Agents) -> Result:
    """Send orders and requests to pause each agent, each on a link of its own."""
    guest = AskingGuest(keep, agents)
    limits = encode_request(LimitsRequest(MachineLimits(paused=True)))
    sent = cut = 0
    for node in guest.agents:
        name = node.raw.hex()
        messages = (
            encode_pause(PauseOrder(1, True)),
            encode_pause(PauseOrder(2, True, 1e12)),
            encode_pause(PauseAnswer(3, True, "it is paused")),
            encode_owner(OwnerRequest(4, limits)),
            encode_owner(OwnerRequest(5, encode_request(PauseMachineRequest(name, True)))),
        )
        for message in messages:
            link = await guest.dial(node, ROUTE_AGENT_BULK)
            link.send(message)
            sent += 1
            await asyncio.sleep(1.0)
            cut += link.closed is not None
            link.close("done")
    return {"sent": sent, "told": guest.answers, "cut": cut}
