"""Listener with an agent's policy: routes, runs and requests; and the policy of the settings."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from barnraise.agent_client import ListenerClient
from barnraise.core.config import NetworkSettings, Settings, StateSettings
from barnraise.core.errors import AgentError, ListenerError
from barnraise.identity import NodeKey
from barnraise.transport.ipc.fd_passing import IpcChannel
from barnraise.transport.ipc.local_socket import dial_local
from barnraise.transport.ipc.messages import (
    LARGEST_BODY,
    DialTicket,
    ListenerReply,
    ListenerRequest,
    ListenerStanding,
    ListenerStatus,
    RegisterEndpoint,
    RegistrationRefused,
    Reply,
    decode_reply,
    encode_message,
)
from barnraise.transport.listener import listener as listener_module
from barnraise.transport.listener.acceptor import ConnectionRefusal
from barnraise.transport.listener.connection_policy import ConnectionPolicy, SettingsConnectionPolicy
from barnraise.transport.listener.listener import Listener
from barnraise.transport.listener.preface import (
    ANSWER_BYTES,
    PAIRING_KEY,
    ROUTE_AGENT,
    ROUTE_AGENT_BULK,
    ROUTE_PAIRING,
    ROUTE_WORKER,
    Preface,
    encode,
    parse_answer,
    refuse_route,
    target_of,
)
from tests.unit.transport.listening_machines import SECRET, Machine

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="written with care, not run there yet")
T = TypeVar("T")


class Visited(Machine):
    """Policy that keeps the raw connections that are delivered to it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory
        self.visitors: list[tuple[Preface, socket.socket, str]] = []
        self.refusal: ConnectionRefusal | None = None
        self.fault: Exception | None = None
        self.stop_listening: Callable[[], None] = lambda: None

    def key_for(self, route: int, target: bytes) -> bytes | None:
        if route == ROUTE_PAIRING:
            return PAIRING_KEY if target == b"open offer".ljust(16) else None
        return super().key_for(route, target)

    def deliver(self, preface: Preface, connection: socket.socket, address: str) -> ConnectionRefusal | None:
        if self.fault is not None:
            raise self.fault
        if self.refusal is None:
            self.visitors.append((preface, connection, address))
        return self.refusal


class Home:
    """Machine whose loop runs in a thread, so that a test may block."""

    def __init__(self, make: Callable[[], Machine]) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.machine = make()
        self.do(self.machine.listener.start())

    def do(self, action: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(action, self._loop).result(90)

    def stop(self) -> None:
        self.do(self.machine.listener.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._runner.close()


@pytest.fixture
def visited(tmp_path: Path) -> Iterator[Visited]:
    home = Home(lambda: Visited(tmp_path))
    assert isinstance(home.machine, Visited)
    home.machine.stop_listening = lambda: home.do(home.machine.listener.stop())
    yield home.machine
    for _, connection, _ in home.machine.visitors:
        connection.close()
    home.stop()


def dial(visited: Machine, preface: Preface, secret: bytes, more: bytes = b"") -> socket.socket:
    dialled = socket.create_connection(("127.0.0.1", visited.listener.port), timeout=60)
    dialled.sendall(encode(preface, secret) + more)
    return dialled


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.01)


def ask(channel: IpcChannel, *questions: ListenerRequest | ListenerStatus | RegisterEndpoint) -> list[Reply]:
    for question in questions:
        channel.send(encode_message(question))
    replies = []
    for _ in questions:
        delivery = channel.receive()
        assert delivery is not None
        replies.append(decode_reply(delivery.message))
    return replies


def local(visited: Visited) -> IpcChannel:
    return IpcChannel(dial_local(visited.directory, 60)[0], takes_sockets=True)


def test_other_routes_are_delivered_to_policy(visited: Visited) -> None:
    target = target_of(visited.node)
    offer = b"open offer".ljust(16)
    knocks = [
        (Preface(target, os.urandom(16), ROUTE_AGENT), SECRET),
        (Preface(target, os.urandom(16), ROUTE_AGENT_BULK), SECRET),
        (Preface(offer, os.urandom(16), ROUTE_PAIRING), PAIRING_KEY),
    ]
    dialled = [dial(visited, preface, secret, b"and more") for preface, secret in knocks]
    wait_for(lambda: len(visited.visitors) == 3)
    for (preface, connection, address), there in zip(
        sorted(visited.visitors, key=lambda visitor: (visitor[0].route - 1) % 4), dialled, strict=True
    ):
        assert preface in [known for known, _ in knocks]
        assert address == f"127.0.0.1:{connection.getpeername()[1]}"
        assert not connection.getblocking()
        assert connection.recv(100) == b"and more"
        connection.sendall(
            b"welcome"
        )  # the listener has closed its copy of the socket: this copy still works
        assert there.recv(100) == b"welcome"
        connection.close()
        assert there.recv(100) == b""
        there.close()


def test_unknown_target_is_closed_silently(visited: Visited) -> None:
    for preface, secret in (
        (Preface(b"other agent".ljust(16), os.urandom(16), ROUTE_AGENT), SECRET),
        (Preface(b"closed offer".ljust(16), os.urandom(16), ROUTE_PAIRING), PAIRING_KEY),
        (Preface(b"open offer".ljust(16), os.urandom(16), ROUTE_PAIRING), SECRET),
        (Preface(target_of(visited.node), os.urandom(16), ROUTE_AGENT), PAIRING_KEY),
    ):
        with dial(visited, preface, secret) as dialled:
            assert dialled.recv(100) == b""
    assert not visited.visitors


def test_pairing_nonces_do_not_evict_others(visited: Visited) -> None:
    """The pairing key is public, so its users must not evict real nonces."""
    keeper = visited.listener.keeper
    first = Preface(target_of(visited.node), os.urandom(16), ROUTE_AGENT)
    dial(visited, first, SECRET).close()
    wait_for(lambda: visited.visitors)
    for number in range(20_000):
        keeper._pairing_replays.add(number.to_bytes(16, "little"))
    assert len(keeper._pairing_replays) <= 1024
    with dial(visited, Preface(b"open offer".ljust(16), first.nonce, ROUTE_PAIRING), PAIRING_KEY):
        wait_for(lambda: len(visited.visitors) == 2)
    with dial(visited, first, SECRET) as replayed:
        assert replayed.recv(100) == b""


def test_refusal_or_error_of_policy_closes_connection(visited: Visited) -> None:
    before = len(os.listdir("/dev/fd"))
    visited.refusal = ConnectionRefusal("not now", refuse_route())
    preface = Preface(target_of(visited.node), os.urandom(16), ROUTE_AGENT)
    with dial(visited, preface, SECRET) as dialled:
        assert parse_answer(dialled.recv(ANSWER_BYTES)).refusal
        assert dialled.recv(1) == b""
    visited.fault = ZeroDivisionError("a bug")
    with dial(visited, Preface(target_of(visited.node), os.urandom(16), ROUTE_AGENT), SECRET) as dialled:
        assert dialled.recv(1) == b""
    wait_for(lambda: len(os.listdir("/dev/fd")) <= before)
    assert visited.listener.keeper.waiting == 0


def test_trust_and_secret_are_read_for_each_ticket(visited: Visited) -> None:
    friend = NodeKey.generate().id
    channels = [local(visited) for _ in range(2)]
    register = RegisterEndpoint(run="mnist", generation=0, pid=os.getpid())
    first = ask(channels[0], register)[0]
    visited.friends.add(friend)
    visited.word = b"n" * 32
    second = ask(channels[1], register)[0]
    assert isinstance(first, DialTicket)
    assert isinstance(second, DialTicket)
    assert (first.secret, second.secret) == (SECRET, b"n" * 32)
    assert set(second.trusted) - set(first.trusted) == {friend.raw}
    with dial(visited, Preface(first.worker, os.urandom(16), ROUTE_WORKER), SECRET) as old:
        assert old.recv(100) == b""
    with dial(visited, Preface(first.worker, os.urandom(16), ROUTE_WORKER), b"n" * 32):
        delivery = channels[0].receive()
        assert delivery is not None
        assert delivery.socket is not None
        delivery.socket.close()
    for channel in channels:
        channel.close()


def test_agent_names_and_rejected_runs_get_no_ticket(visited: Visited) -> None:
    channel = local(visited)
    for run, why in (("@agent", "cannot begin with @"), ("@", "cannot begin"), ("unknown", "not known")):
        (reply,) = ask(channel, RegisterEndpoint(run=run, generation=0, pid=1))
        assert isinstance(reply, RegistrationRefused)
        assert why in reply.message
    channel.close()


def test_policy_answers_requests_of_local_processes(visited: Visited) -> None:
    with ListenerClient.connect(visited.directory, timeout=60) as client:
        assert client.standing().agent
        assert client.ask(b"echo", 60) == b"echoecho"
        large = os.urandom(LARGEST_BODY)
        assert client.ask(large, 60) == large
        with pytest.raises(AgentError, match="not today") as caught:
            client.ask(b"refuse", 60)
        assert caught.value.hint == "Come tomorrow."
        with pytest.raises(AgentError, match="failed with ZeroDivisionError"):
            client.ask(b"fail", 60)
        with pytest.raises(AgentError, match="too long"):
            client.ask(bytes(LARGEST_BODY + 1), 60)
        assert client.ask(b"", 60) == b""
        assert client.standing().workers == 0
        assert client.register("mnist", 0).run == "mnist"


def test_request_without_answer_times_out_and_is_cancelled(visited: Visited) -> None:
    while not visited.questions:  # a slow listener may read the request only after its timeout
        with ListenerClient.connect(visited.directory) as client:
            with pytest.raises(AgentError, match=r"within 0\.2 s"):
                client.ask(b"wait", 0.2)
            with pytest.raises(AgentError, match="has stopped"):
                client.ask(b"echo", 1)
    wait_for(visited.busy.is_set)


def test_answers_keep_the_order_of_the_requests(visited: Visited) -> None:
    channel = local(visited)
    register = RegisterEndpoint(run="mnist", generation=0, pid=os.getpid())
    replies = ask(channel, ListenerRequest(b"a"), ListenerStatus(), ListenerRequest(b"refuse"), register)
    assert [type(reply) for reply in replies] == [
        ListenerReply,
        ListenerStanding,
        RegistrationRefused,
        DialTicket,
    ]
    (reply,) = ask(channel, ListenerRequest(b"b"))  # a worker's connection carries sockets, no long answers
    assert isinstance(reply, RegistrationRefused)
    assert "belongs to a worker" in reply.message
    channel.close()


def test_process_with_endless_requests_is_disconnected(visited: Visited) -> None:
    channel, other = local(visited), local(visited)
    channel.send(encode_message(ListenerRequest(b"wait")))
    wait_for(lambda: visited.questions)
    for _ in range(listener_module._MOST_QUESTIONS):
        channel.send(encode_message(ListenerRequest(b"wait")))
    assert channel.receive() is None
    assert channel.closed
    wait_for(visited.busy.is_set)
    assert ask(other, ListenerRequest(b"x")) == [ListenerReply(b"xx")]
    channel.close()
    other.close()


def test_process_that_does_not_read_is_disconnected(
    visited: Visited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_TELL_S", 0.2)
    channel, other = local(visited), local(visited)
    wait_for(lambda: len(visited.listener._locals) == 2)
    channel.send(encode_message(ListenerRequest(bytes(LARGEST_BODY))))
    wait_for(lambda: len(visited.listener._locals) == 1)
    assert ask(other, ListenerRequest(b"x")) == [ListenerReply(b"xx")]
    channel.close()
    other.close()


def test_answer_that_is_too_long_becomes_refusal(visited: Visited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "LARGEST_BODY", 10)
    channel = local(visited)
    (reply,) = ask(channel, ListenerRequest(b"123456"))
    assert isinstance(reply, RegistrationRefused)
    assert "12 bytes" in reply.message
    channel.close()


def test_disconnect_and_stop_leave_nothing(visited: Visited) -> None:
    before = len(os.listdir("/dev/fd"))
    for _ in range(20):
        channel = local(visited)
        channel.send(encode_message(ListenerRequest(b"wait")))
        channel.close()
    wait_for(lambda: len(os.listdir("/dev/fd")) <= before)
    visited.questions.clear()
    channel = local(visited)
    channel.send(encode_message(ListenerRequest(b"wait")))
    wait_for(lambda: visited.questions)
    visited.stop_listening()
    assert channel.receive() is None
    channel.close()


def test_listener_without_agent_refers_to_agent(tmp_path: Path) -> None:
    settings = Settings(state=StateSettings(directory=str(tmp_path)), network=NetworkSettings(port=0))
    plain = SettingsConnectionPolicy(settings)
    as_house: ConnectionPolicy = plain
    assert as_house.trusted("mnist") == (plain.key.id,)
    assert as_house.key_for(ROUTE_WORKER, bytes(16)) == as_house.secret()
    for route in (ROUTE_PAIRING, ROUTE_AGENT, ROUTE_AGENT_BULK, 200):
        assert as_house.key_for(route, bytes(16)) is None
    assert as_house.refuse_run("mnist") is None

    async def converse() -> None:
        listener = Listener(settings)
        await listener.start()
        assert listener.node == plain.key.id
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, question)
        await listener.stop()

    def question() -> None:
        with ListenerClient.connect(tmp_path, timeout=60) as client:
            assert not client.standing().agent
            with pytest.raises(AgentError, match="no agent") as caught:
                client.ask(b"status", 60)
            assert caught.value.hint == "Start the agent: barnraise up"
        with pytest.raises(ListenerError):
            ListenerClient.connect(tmp_path / "nowhere")

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(converse())
