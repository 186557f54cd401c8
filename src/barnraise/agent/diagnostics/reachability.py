"""Reachability checks (as AutoNAT): dials a peer, and asks a peer to dial back.

A dial is a complete handshake whose connection is never opened. It proves route, port and key, and the other
side keeps no state. A peer dials back only to addresses that it knows already: a request contains no address.
A guest names its own addresses and could scan an owner's network with them. So only the address of its link
is dialled, and it learns only whether that succeeded.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from barnraise.agent import protocol
from barnraise.agent.cluster.connections import PeerAddress
from barnraise.core.errors import BarnraiseError
from barnraise.identity import NodeId
from barnraise.transport.address_race import dialable
from barnraise.transport.control.dial import (
    AgentTls,
    ControlConnection,
    DialOptions,
    dial_unopened,
    was_refused,
)
from barnraise.transport.listener.preface import ANY_AGENT, ROUTE_AGENT, target_of

MAX_ADDRESSES = 5
DIAL_S = 2.0
_ANSWER_S = 2 * DIAL_S
_MAX_DIALS = 32
_MAX_CLIENTS = 4
_EACH_S = 3.0
_WINDOW_S = 10.0
_MAX_PER_WINDOW = 20

# "unreached" stands for every failure in an answer to a guest.
Outcome = Literal["answered", "refused", "silent", "unreachable", "forbidden", "other", "unreached"]
_UNREACHABLE = {
    getattr(errno, name)
    for name in ("EHOSTUNREACH", "ENETUNREACH", "EHOSTDOWN", "ENETDOWN", "WSAEHOSTUNREACH", "WSAENETUNREACH")
    if hasattr(errno, name)
}
_FORBIDDEN = {errno.EPERM, errno.EACCES, getattr(errno, "WSAEACCES", errno.EACCES)}


class DialResult(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of dialling one address; ``incarnation``: of the agent that answered."""

    address: protocol.Address
    outcome: Outcome
    words: Annotated[str, Meta(max_length=300)] = ""
    rtt_ms: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    node: Annotated[bytes, Meta(max_length=32)] = b""
    incarnation: Annotated[bytes, Meta(max_length=16)] = b""


class DialBackRequest(msgspec.Struct, frozen=True, array_like=True, tag="?"):
    """Request to dial the sender; the response is a `DialBackReply`."""

    serial: Annotated[int, Meta(ge=0, lt=2**32)]


class DialBackReply(msgspec.Struct, frozen=True, array_like=True, tag="!"):
    """Results of dialling back, and the sender's clock; ``declined``: why it did not dial."""

    serial: Annotated[int, Meta(ge=0, lt=2**32)]
    results: Annotated[tuple[DialResult, ...], Meta(max_length=MAX_ADDRESSES)]
    wall_s: Annotated[float, Meta(ge=0, le=1e12)]
    declined: Annotated[str, Meta(max_length=200)] = ""


_decoder: msgspec.msgpack.Decoder[DialBackRequest | DialBackReply] = msgspec.msgpack.Decoder(
    DialBackRequest | DialBackReply
)


def encode_dial_back(message: DialBackRequest | DialBackReply) -> bytes:
    """Encode a message with its kind byte."""
    return protocol.SURVEY + msgspec.msgpack.encode(message)


def decode_dial_back(body: bytes | memoryview) -> DialBackRequest | DialBackReply:
    """Decode a message; raise ProtocolError if it is invalid."""
    return protocol.decode(_decoder, body)


def outcome_of(error: BarnraiseError) -> Outcome:
    """Classify the error of a failed dial. Pure."""
    cause = error.__cause__
    if was_refused(error):
        return "refused"
    if isinstance(cause, TimeoutError):
        return "silent"
    if isinstance(cause, OSError) and cause.errno in _UNREACHABLE:
        return "unreachable"
    if isinstance(cause, OSError) and cause.errno in _FORBIDDEN:
        return "forbidden"
    return "other"


def for_guest(result: DialResult) -> DialResult:
    """Return what a guest learns of a dial: that it succeeded, or that it did not. Pure."""
    if result.outcome == "answered":
        return result
    return DialResult(result.address, "unreached", f"{result.address} is not reached from there")


# Not core.flow.rate_limit: a strict window over all nodes and a limit of concurrent dials, no bursts.
class DialBackLimiter:
    """Rate limit of dial-backs, per node and in total. Pure."""

    def __init__(self) -> None:
        self._last: dict[NodeId, float] = {}
        self._lately: deque[float] = deque()
        self._inside = 0

    def enter(self, node: NodeId, now: float) -> str | None:
        """Return None if a dial-back may start, else why not; `leave` must follow a start."""
        self._last = {other: then for other, then in self._last.items() if now - then < _EACH_S}
        while self._lately and now - self._lately[0] >= _WINDOW_S:
            self._lately.popleft()
        if node in self._last:
            return "asked again too soon"
        if self._inside >= _MAX_CLIENTS or len(self._lately) >= _MAX_PER_WINDOW:
            return "busy with other requests"
        self._last[node] = now
        self._lately.append(now)
        self._inside += 1
        return None

    def leave(self) -> None:
        """Note that a dial-back has finished."""
        self._inside -= 1


class ReachabilityProber:
    """Dials for this machine's doctor and for its peers; every wait has a timeout."""

    def __init__(
        self,
        tls: AgentTls,
        place: Callable[[NodeId], PeerAddress | None],
        secret_for: Callable[[NodeId | None, int], bytes],
        get: Callable[[NodeId], ControlConnection | None],
        is_owner: Callable[[NodeId], bool],
    ) -> None:
        self._tls = tls
        self._place = place
        self._secret_for = secret_for
        self._get = get
        self._is_owner = is_owner
        self._limiter = DialBackLimiter()
        self._serial = 0
        self._waiting: dict[tuple[NodeId, int], asyncio.Future[DialBackReply]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._dial_slots = asyncio.Semaphore(_MAX_DIALS)

    def received(self, link: ControlConnection, body: bytes | memoryview) -> None:
        """Handle a message of kind SURVEY; raise ProtocolError if it cannot be decoded."""
        message = decode_dial_back(body)
        node = link.peer.node
        if isinstance(message, DialBackReply):
            answered = self._waiting.get((node, message.serial))
            if answered is not None and not answered.done():
                answered.set_result(message)
            return
        refusal = self._limiter.enter(node, asyncio.get_running_loop().time())
        if refusal is None:
            self._spawn(self._dial_back(link, message.serial))
        else:
            link.send(encode_dial_back(DialBackReply(message.serial, (), _wall(), refusal)))

    async def request_dial_back(self, node: NodeId) -> DialBackReply | str:
        """Ask a peer to dial this machine; return its reply, or why there is none."""
        link = self._get(node)
        if link is None:
            return "there is no connection to ask over"
        self._serial = (self._serial + 1) % 2**32
        key = (node, self._serial)
        answered = self._waiting[key] = asyncio.get_running_loop().create_future()
        try:
            link.send(encode_dial_back(DialBackRequest(self._serial)))
            reply: DialBackReply = await asyncio.wait_for(answered, _ANSWER_S)
        except TimeoutError:
            return f"it did not answer within {_ANSWER_S:g} s"
        finally:
            del self._waiting[key]
        return reply.declined or reply

    async def dial_node(self, node: NodeId, addresses: Iterable[str] = ()) -> tuple[DialResult, ...]:
        """Dial all known addresses of a node at once, the given ones first."""
        place = self._place(node)
        if place is None:
            return ()
        targets = dialable((*addresses, *place.addresses))[:MAX_ADDRESSES]
        secret = self._secret_for(node, place.epoch)
        results = [self.dial(address, place.port, secret, node) for address in targets]
        return tuple(await asyncio.gather(*results))

    async def dial(self, address: str, port: int, secret: bytes, expect: NodeId | None) -> DialResult:
        """Dial one address; ``expect`` None accepts any member."""
        target = ANY_AGENT if expect is None else target_of(expect)
        options = DialOptions(ROUTE_AGENT, target, secret, self._tls, expect, DIAL_S)
        async with self._dial_slots:
            try:
                link = await dial_unopened(address, port, options)
            except BarnraiseError as error:
                return DialResult(address[:64], outcome_of(error), error.message[:300])
            try:
                trip = await link.ping(DIAL_S)
            except BarnraiseError as error:
                return DialResult(address[:64], "other", error.message[:300])
            finally:
                link.close("it was a reachability check")
        peer = link.peer
        return DialResult(address[:64], "answered", "", round(trip * 1e3, 3), peer.node.raw, peer.worker)

    async def close(self) -> None:
        """Cancel all dial-backs in progress."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _dial_back(self, link: ControlConnection, serial: int) -> None:
        try:
            results = await self._dial_peer(link)
        finally:
            self._limiter.leave()
        declined = "" if results else "it knows no address of this machine"
        link.send(encode_dial_back(DialBackReply(serial, results, _wall(), declined)))

    async def _dial_peer(self, link: ControlConnection) -> tuple[DialResult, ...]:
        node = link.peer.node
        if self._is_owner(node):
            return await self.dial_node(node, [link.address])
        place = self._place(node)
        targets = dialable([link.address])
        if place is None or not targets:
            return ()
        secret = self._secret_for(node, place.epoch)
        return (for_guest(await self.dial(targets[0], place.port, secret, node)),)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _wall() -> float:
    """Return the wall clock, for a comparison that people read."""
    return max(0.0, time.time())
