"""Attacks by a guest of the cluster: its key and its links are good, what it says is not.

Run by ``benchmarks.attacks``. A guest may say where it is and that it lives; it decides nothing, speaks for
nobody else, and is believed nothing about others.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from backyard.agent import surveyor, wire
from backyard.core.errors import BackyardError
from backyard.identity import NodeId, NodeKey, delegate
from backyard.identity.trust import Admit, Revoke, TrustLog, _signed, decode_entry, encode_entry
from backyard.membership.agreement import (
    Accept,
    Accepted,
    Ballot,
    Decision,
    Prepare,
    Promise,
    Refuse,
)
from backyard.membership.messages import Beat, Behind, Decided, Goodbye, Message, Wish
from backyard.membership.view import Present, View, decide
from backyard.topology import LinkFacts
from backyard.transport.agent_tls import AGENT_RUN, AgentTls
from backyard.transport.control import ControlLink, dial_agent
from backyard.transport.control_frames import Kind, encode_control
from backyard.transport.preface import ROUTE_AGENT, target_of

READY = "ready"
_BEAT_S = 0.3
_HUGE = 2**53

Result = dict[str, Any]
Agents = Sequence[tuple[str, int, str]]
ATTACKS: dict[str, Callable[..., Awaitable[Result]]] = {}


class Guest:
    """A guest without an agent: it beats as one of ours would, except for what it lies about."""

    def __init__(self, keep: str, agents: Agents) -> None:
        self.key = NodeKey.load_or_create(Path(keep) / "key")
        lines = (Path(keep) / "log").read_text().split()
        self.log = TrustLog.read(decode_entry(bytes.fromhex(line)) for line in lines)
        self.agents = {NodeId(bytes.fromhex(node)): (host, port) for host, port, node in agents}
        self.incarnation = os.urandom(16)
        self.links: dict[NodeId, ControlLink] = {}
        self.heard: dict[NodeId, Beat] = {}
        self.dialled = 0
        self.lies: Callable[[], dict[str, Any]] = dict
        self._serials = itertools.count(1)

    @property
    def me(self) -> Present:
        return Present(self.key.id.raw, self.incarnation, votes=False)

    async def dial(self, node: NodeId) -> ControlLink:
        host, port = self.agents[node]
        credentials = delegate(self.key, run=AGENT_RUN, worker=self.incarnation)
        self.dialled += 1
        return await dial_agent(
            host,
            port,
            route=ROUTE_AGENT,
            target=target_of(node),
            secret=self.log.secret,
            tls=AgentTls(credentials, lambda: self.agents),
            expect=node,
            on_message=self._received,
            on_closed=lambda link, why: None,
        )

    async def link(self, node: NodeId) -> ControlLink:
        """The link to this agent, made anew if it was cut."""
        found = self.links.get(node)
        if found is None or found.closed is not None:
            found = self.links[node] = await self.dial(node)
        return found

    def _received(self, link: ControlLink, message: bytes) -> None:
        if message[:1] == wire.MEMBERSHIP:
            found = wire.decode_membership(message[1:])
            if isinstance(found, Beat):
                self.heard[link.peer.node] = found

    def beat(self, node: NodeId) -> bytes | None:
        """What it says to this agent now; nothing before the agent has beaten first."""
        heard = self.heard.get(node)
        if heard is None:
            return None
        honest = Beat(
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
        return wire.encode_membership(msgspec.structs.replace(honest, **self.lies()))

    async def live(self, seconds: float, pause_s: float = _BEAT_S) -> None:
        """Beat, with the lies of the moment."""
        end = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            for node in self.agents:
                words = self.beat(node) if node in self.links else None
                await self.say(node, [] if words is None else [words])
            await asyncio.sleep(pause_s)

    async def say(self, node: NodeId, messages: Iterable[bytes]) -> None:
        try:
            link = await self.link(node)
            for message in messages:
                link.send(message)
                if link.queued > 1 << 20:
                    await link.drain(5.0)
                if link.closed is not None:
                    return
        except BackyardError:
            await asyncio.sleep(0.05)

    async def leave(self) -> None:
        self.lies = dict
        for node in self.agents:
            await self.say(node, [wire.encode_membership(Goodbye(self.incarnation))])
        await asyncio.sleep(0.5)
        for link in self.links.values():
            link.close("it leaves")


def attack(function: Callable[..., Awaitable[Result]]) -> Callable[..., Awaitable[Result]]:
    ATTACKS[function.__name__] = function
    return function


@attack
async def guest_decides(keep: str, agents: Agents, friend: str, times: int) -> Result:
    """Act as an owner: propose, vote, announce, admit a friend, remove the others, and remove its host."""
    guest = Guest(keep, agents)
    await guest.live(1.5)
    for _ in range(times):
        for node in guest.agents:
            words = _decisions(guest, node, bytes.fromhex(friend))
            await guest.say(node, map(wire.encode_membership, words))
        await guest.live(0.01)
    # What only an owner may say ends the link.
    for node in guest.agents:
        await guest.say(node, [wire.REMOVED])
    await guest.live(1.0)
    await guest.leave()
    return {"dialled": guest.dialled}


def _decisions(guest: Guest, node: NodeId, friend: bytes) -> list[Message]:
    heard, key = guest.heard[node], guest.key
    log = guest.log
    ballot = Ballot(_HUGE, key.id.raw)
    alone = View((Present(key.id.raw, guest.incarnation, votes=True),), len(log), (), why="because I say so")
    last = Decision(heard.branch, heard.number, bytes(32), (), b"")
    coup = decide(last, heard.view, alone)
    branch = msgspec.structs.replace(coup, branch=heard.branch + 1)
    admits = _signed(key, len(log), log.head, Admit(node=friend, role="owner", name="friend"))
    removes = _signed(key, len(log), log.head, Revoke(node=node.raw, secret=os.urandom(32)))
    return [
        Prepare(heard.view, ballot),
        Promise(heard.view, ballot, None),
        Accept(ballot, coup),
        Accepted(heard.view, ballot),
        Refuse(heard.view, ballot, ballot),
        Decided(coup),
        Decided(branch, 0, tuple(map(encode_entry, log.entries))),
        Behind(0),
        Wish(encode_entry(admits)),
        Wish(encode_entry(removes)),
    ]


@attack
async def guests_lie(keeps: Sequence[str], agents: Agents, away: str, seconds: float) -> Result:
    """Two guests say the same untruths in their beats, one kind after the other."""
    guests = [Guest(keep, agents) for keep in keeps]
    await _together(guest.live(2.0) for guest in guests)
    owners = tuple(sorted(node.raw for node in guests[0].agents))
    absent = Present(bytes.fromhex(away), os.urandom(16))
    nobody = Present(os.urandom(32), os.urandom(16))
    again = tuple(Present(node, os.urandom(16)) for node in owners)
    lies: dict[str, Callable[[], dict[str, Any]]] = {
        "suspects everybody": lambda: {"suspects": owners},
        "visitors that are not there": lambda: {"visitors": (nobody, absent, *again)},
        "a later view": lambda: {"number": _HUGE, "view": os.urandom(32), "log_length": 4096},
        "a later branch": lambda: {"branch": _HUGE, "log_length": 4096, "log_head": os.urandom(32)},
        "another view": lambda: {"view": os.urandom(32)},
        "another log": lambda: {"log_head": os.urandom(32), "log_length": 1},
        "time": lambda: {"held_us": _HUGE, "echo": _HUGE, "serial": _HUGE},
    }
    for lie in lies.values():
        for guest in guests:
            guest.lies = lie
        await _together(guest.live(seconds) for guest in guests)
    await _together(guest.leave() for guest in guests)
    return {"dialled": sum(guest.dialled for guest in guests), "lies": list(lies)}


@attack
async def guest_poses(keep: str, agents: Agents, away: str, seconds: float) -> Result:
    """Beat in the name of others, and as ever new incarnations of itself."""
    guest = Guest(keep, agents)
    await guest.live(1.5)
    others = itertools.cycle([*(node.raw for node in guest.agents), bytes.fromhex(away), os.urandom(32)])
    name = next(others)
    guest.lies = lambda: {"me": Present(name, os.urandom(16), votes=True)}
    for _ in range(5):
        name = next(others)
        await guest.live(seconds / 5, 0.1)
    works = itertools.cycle((True, False))
    guest.lies = lambda: {"me": msgspec.structs.replace(guest.me, works=next(works))}
    await guest.live(seconds, 0.05)
    await guest.leave()
    return {"dialled": guest.dialled}


@attack
async def guest_babbles(keep: str, agents: Agents, times: int) -> Result:
    """What no agent sends: unknown kinds, nests, lengths, names that are no names."""
    guest = Guest(keep, agents)
    await guest.live(1.0)
    deep = b"\x91" * 100_000 + b"\xc0"
    kinds = (wire.MEMBERSHIP, wire.GREETING, wire.TRAIN, wire.SURVEY, wire.BOARD)
    words = [b"", b"\x00", b"zzz", *(kind + deep for kind in kinds), *kinds]
    words += [kind + os.urandom(200) for kind in kinds]
    ended = Counter[str]()
    for _ in range(times):
        for node in guest.agents:
            for message in words:
                await guest.say(node, [message])
                await asyncio.sleep(0)
    frames = [struct.pack("<IB", 2**31, 0), struct.pack("<IB", 2**32 - 1, 1), struct.pack("<IB", 5, 77)]
    frames += [encode_control(Kind.OPEN, bytes(7)), encode_control(Kind.MESSAGE, b"")]
    for node in guest.agents:
        for frame in frames:
            link = await guest.dial(node)
            link._transport.write(link._session.encrypt(frame))  # type: ignore[union-attr]
            for _ in range(100):
                if link.closed is not None:
                    break
                await asyncio.sleep(0.02)
            ended["closed" if link.closed is not None else "open"] += 1
            link.close("over")
    await guest.live(0.5)
    await guest.leave()
    return {"dialled": guest.dialled, "frames": dict(ended)}


@attack
async def guest_fills(keep: str, agents: Agents, links: int, chunks: int, names: int) -> Result:
    """Take what there is to take: links, memory of measurements, the disk of whoever notes its name."""
    guest = Guest(keep, agents)
    await guest.live(1.0)
    many = []
    for node in guest.agents:
        for _ in range(links):
            try:
                many.append(await guest.dial(node))
            except BackyardError:
                break
    kept = [link for link in many if link.closed is None]
    live = asyncio.ensure_future(guest.live(20.0))
    for node in guest.agents:
        crumbs = [surveyor._encode(surveyor.Chunk(7, b"x"))] * chunks
        facts = [surveyor._encode(surveyor.Told(tuple(_facts(guest.agents)))) for _ in range(20)]
        greetings = [
            wire.encode_greeting(wire.Greeting(f"\x1b[31mh{number}", "\x07", ("192.0.2.1",) * 16, 9, 4096))
            for number in range(names)
        ]
        for batch in (crumbs, facts, greetings):
            await guest.say(node, batch)
    await asyncio.sleep(1.0)
    print(READY, flush=True)
    await asyncio.sleep(4.0)
    still = sum(link.closed is None for link in kept)
    live.cancel()
    for link in kept:
        link.close("over")
    await guest.leave()
    return {"opened": len(many), "open_still": still, "dialled": guest.dialled}


def _facts(nodes: Iterable[NodeId]) -> list[LinkFacts]:
    """About links that are not its own."""
    names = sorted(node.raw.hex() for node in nodes)
    pairs = itertools.combinations(names, 2)
    return [LinkFacts(a=a, b=b, rtt_s=99.0, mbps=0.1, reason="x" * 100) for a, b in pairs]


async def _together(works: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*works)
