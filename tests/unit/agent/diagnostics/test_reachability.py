"""Dials and dial-backs: messages, rate limit, and machines over real sockets."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.agent import protocol
from barnraise.agent.cluster.connections import PeerAddress
from barnraise.agent.diagnostics import collect, reachability
from barnraise.agent.diagnostics.reachability import (
    DialBackLimiter,
    DialBackReply,
    DialBackRequest,
    DialResult,
    ReachabilityProber,
    decode_dial_back,
    encode_dial_back,
    outcome_of,
)
from barnraise.core.errors import ProtocolError, TransportError
from barnraise.identity import NodeId, NodeKey
from barnraise.transport.control.dial import ControlConnection
from barnraise.transport.listener import acceptor
from tests.unit.changed_bytes import changed, read_or_refused
from tests.unit.transport.listening_machines import Machine, Street

GOOD = DialResult("192.168.1.7", "answered", rtt_ms=0.4)
SILENT = DialResult("192.168.1.7", "silent", "192.168.1.7:52416 does not answer")


MESSAGES = (
    DialBackRequest(7),
    DialBackReply(7, (GOOD, SILENT), 1.8e9),
    DialBackReply(7, (), 0.0, "busy"),
)


@pytest.mark.parametrize("message", MESSAGES)
def test_dial_back_messages_round_trip(message: DialBackRequest | DialBackReply) -> None:
    data = encode_dial_back(message)
    assert data[:1] == protocol.SURVEY
    assert decode_dial_back(data[1:]) == message


@pytest.mark.parametrize(
    "message",
    [
        DialBackRequest(-1),
        DialBackRequest(2**32),
        DialBackReply(0, (GOOD,) * 6, 0.0),
        DialBackReply(0, (), -1.0),
        DialBackReply(0, (), 0.0, "x" * 201),
        DialBackReply(0, (DialResult("x" * 65, "answered"),), 0.0),
        DialBackReply(0, (DialResult("x", "answered", "y" * 301),), 0.0),
        DialBackReply(0, (DialResult("x", "answered", rtt_ms=-1.0),), 0.0),
        DialBackReply(0, (msgspec.structs.replace(GOOD, outcome="stolen"),), 0.0),  # type: ignore[arg-type]
    ],
)
def test_dial_back_messages_out_of_bounds_raise(message: DialBackRequest | DialBackReply) -> None:
    with pytest.raises(ProtocolError):
        decode_dial_back(encode_dial_back(message)[1:])


@given(st.binary(max_size=200) | changed([encode_dial_back(message)[1:] for message in MESSAGES]))
def test_decode_dial_back_changed_bytes_give_message_or_protocol_error(data: bytes) -> None:
    read_or_refused(data, decode_dial_back, lambda message: encode_dial_back(message)[1:], ProtocolError)


def test_limiter_per_node_and_total() -> None:
    nodes = [NodeKey.generate().id for _ in range(30)]
    gate = DialBackLimiter()
    assert gate.enter(nodes[0], 0.0) is None
    gate.leave()
    assert gate.enter(nodes[0], 1.0) == "asked again too soon"
    assert gate.enter(nodes[0], 4.0) is None
    assert [gate.enter(node, 4.0) for node in nodes[1:5]] == [None] * 3 + ["busy with other requests"]
    for _ in range(4):
        gate.leave()
    admitted = 0
    for node in nodes[5:]:
        if gate.enter(node, 5.0) is None:
            gate.leave()
            admitted += 1
    assert admitted == 15, "twenty in ten seconds, for all nodes together"
    assert gate.enter(nodes[5], 20.0) is None


@pytest.mark.parametrize(
    ("cause", "outcome"),
    [
        (ConnectionRefusedError(), "refused"),
        (TimeoutError(), "silent"),
        (OSError(errno.EHOSTUNREACH, "no route"), "unreachable"),
        (PermissionError(errno.EPERM, "not permitted"), "forbidden"),
        (OSError(errno.EIO, "x"), "other"),
        (None, "other"),
    ],
)
def test_outcome_of_dial_error(cause: OSError | None, outcome: str) -> None:
    error = TransportError("x")
    error.__cause__ = cause
    assert outcome_of(error) == outcome


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


class ProbedMachine(Machine):
    """A machine with a prober: it knows where its neighbours are and passes their words on."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        self.at: dict[NodeId, PeerAddress] = {}
        self.to: dict[NodeId, ControlConnection] = {}
        self.guests: set[NodeId] = set()
        self.prober = ReachabilityProber(
            self.tls,
            self.at.get,
            lambda node, epoch: self.word,
            self.to.get,
            lambda node: node not in self.guests,
        )

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_message": lambda link, message: self.prober.received(link, message[1:]),
            "on_closed": lambda link, why: None,
        }

    def knows(self, other: ProbedMachine, *addresses: str, port: int | None = None) -> None:
        self.at[other.node] = PeerAddress(addresses or ("127.0.0.1",), port or other.listener.port)


def with_two_machines(
    tmp_path: Path, body: Callable[[ProbedMachine, ProbedMachine], Coroutine[Any, Any, None]]
) -> None:
    """Two machines that trust each other, linked by the first one's call."""

    async def main() -> None:
        street = Street(tmp_path)
        try:
            machines = []
            for name in "ab":
                new = ProbedMachine(tmp_path / name)
                await new.listener.start()
                street.machines.append(new)
                machines.append(new)
            first, second = machines
            first.friends.add(second.node)
            second.friends.add(first.node)
            first.knows(second)
            second.knows(first)
            first.to[second.node] = await first.dial(second)
            second.to[first.node] = await asyncio.wait_for(second.links.get(), 60)
            await asyncio.wait_for(body(first, second), 120)
            for machine in machines:
                await machine.prober.close()
        finally:
            await street.close()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())


@pytest.mark.usefixtures("_patient")
def test_dial_proves_identity_and_leaves_no_connection(tmp_path: Path) -> None:
    async def body(first: ProbedMachine, second: ProbedMachine) -> None:
        (result,) = await first.prober.dial_node(second.node)
        assert result.outcome == "answered"
        assert (result.node, result.incarnation) == (second.node.raw, second.incarnation)
        assert result.rtt_ms > 0
        stranger = await first.prober.dial("127.0.0.1", second.listener.port, first.word, None)
        assert stranger.node == second.node.raw
        await asyncio.wait_for(second.refusals.get(), 60)
        assert second.links.empty(), "it was never opened"

    with_two_machines(tmp_path, body)


@pytest.mark.usefixtures("_patient")
def test_dial_closed_port_or_wrong_machine(tmp_path: Path) -> None:
    async def body(first: ProbedMachine, second: ProbedMachine) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        first.knows(second, port=port)
        (result,) = await first.prober.dial_node(second.node)
        assert result.outcome == "refused"
        assert str(port) in result.words
        wrong = await first.prober.dial("127.0.0.1", first.listener.port, first.word, second.node)
        assert wrong.outcome == "other"
        assert await first.prober.dial_node(NodeKey.generate().id) == (), "no address to dial"

    with_two_machines(tmp_path, body)


@pytest.mark.usefixtures("_patient")
def test_dial_back_to_known_address_and_rate_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "_EACH_S", 60.0)

    async def body(first: ProbedMachine, second: ProbedMachine) -> None:
        reply = await first.prober.request_dial_back(second.node)
        assert isinstance(reply, DialBackReply)
        assert [result.outcome for result in reply.results] == ["answered"]
        assert reply.results[0].incarnation == first.incarnation
        assert await first.prober.request_dial_back(second.node) == "asked again too soon"

    with_two_machines(tmp_path, body)


@pytest.mark.usefixtures("_patient")
def test_dial_back_failure_returns_reason(tmp_path: Path) -> None:
    async def body(first: ProbedMachine, second: ProbedMachine) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        second.knows(first, port=port)
        reply = await first.prober.request_dial_back(second.node)
        assert isinstance(reply, DialBackReply)
        assert reply.results[0].outcome == "refused"
        del first.at[second.node]
        assert await second.prober.request_dial_back(first.node) == "it knows no address of this machine"
        del second.to[first.node]
        assert await second.prober.request_dial_back(first.node) == "there is no connection to ask over"

    with_two_machines(tmp_path, body)


@pytest.mark.usefixtures("_patient")
def test_dial_back_for_guest_reaches_only_its_link_and_says_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest names addresses of the owner's network and ports, and asks the owner to dial them."""
    monkeypatch.setattr(reachability, "_EACH_S", 0.0)

    async def body(first: ProbedMachine, second: ProbedMachine) -> None:
        second.guests.add(first.node)
        with socket.create_server(("127.0.0.2", 0)) as victim:
            victim.setblocking(False)
            open_port = victim.getsockname()[1]
            second.knows(first, "127.0.0.2", "127.0.0.1", port=open_port)
            reply = await first.prober.request_dial_back(second.node)
            assert isinstance(reply, DialBackReply)
            with pytest.raises(BlockingIOError):
                victim.accept()
        closed = await first.prober.request_dial_back(second.node)
        assert isinstance(closed, DialBackReply)
        assert reply.results == closed.results, "an open and a closed port look alike"
        assert reply.results == (DialResult("127.0.0.1", "unreached", "127.0.0.1 is not reached from there"),)
        second.knows(first, "127.0.0.2")
        reached = await first.prober.request_dial_back(second.node)
        assert isinstance(reached, DialBackReply)
        assert [(result.address, result.outcome) for result in reached.results] == [("127.0.0.1", "answered")]

    with_two_machines(tmp_path, body)


def test_for_guest_failures_look_alike() -> None:
    outcomes = ("refused", "silent", "unreachable", "forbidden", "other")
    answers = {reachability.for_guest(DialResult("10.0.0.1", outcome, outcome)) for outcome in outcomes}
    assert len(answers) == 1
    assert reachability.for_guest(GOOD) == GOOD


@pytest.mark.usefixtures("_patient")
def test_dial_back_unrequested_reply_is_dropped(tmp_path: Path) -> None:
    async def body(first: ProbedMachine, second: ProbedMachine) -> None:
        link = second.to[first.node]
        for serial in range(1000, 1050):
            link.send(encode_dial_back(DialBackReply(serial, (GOOD,), 1.0)))
        reply = await first.prober.request_dial_back(second.node)
        assert isinstance(reply, DialBackReply)
        assert reply.results[0].incarnation == first.incarnation
        link.send(protocol.SURVEY + b"\xff\xff")
        await until(lambda: first.to[second.node].closed is not None)
        assert "cannot be read" in (first.to[second.node].closed or "")

    with_two_machines(tmp_path, body)
