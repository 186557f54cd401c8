"""Listener with real sockets: valid connections pass while unknown peers misbehave."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from barnraise.core.config import NetworkSettings, Settings, StateSettings, TrustSettings
from barnraise.core.errors import IdentityError, ListenerError
from barnraise.identity import NodeId, NodeKey, read_worker
from barnraise.transport.ipc.fd_passing import IpcChannel, encode_frame
from barnraise.transport.ipc.local_socket import dial_local
from barnraise.transport.ipc.messages import (
    DialTicket,
    IncomingConnection,
    ListenerStanding,
    ListenerStatus,
    RegisterEndpoint,
    RegistrationRefused,
    Reply,
    decode_reply,
    encode_message,
)
from barnraise.transport.listener import acceptor as doorkeeper_module
from barnraise.transport.listener.listener import Listener
from barnraise.transport.listener.preface import (
    PREFACE_BYTES,
    Preface,
    encode,
    parse_answer,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="written with care, not run there yet")


class Running:
    """Listener on a loop in a thread of its own."""

    def __init__(self, settings: Settings, **options: bool) -> None:
        self.directory = Path(settings.state.directory or "")
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.listener = Listener(settings, **options)
        try:
            self.call(self.listener.start)
        except BaseException:
            self.stop()
            raise

    def call(self, action: Callable[[], object]) -> None:
        async def perform() -> None:
            result = action()
            if asyncio.iscoroutine(result):
                await result

        asyncio.run_coroutine_threadsafe(perform(), self._loop).result(90)

    def stop(self) -> None:
        self.call(self.listener.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._runner.close()

    def local(self) -> IpcChannel:
        connection, _ = dial_local(self.directory, 60)
        return IpcChannel(connection, takes_sockets=True)

    def dial(self, *, host: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection((host, self.listener.port), timeout=60)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def ask(channel: IpcChannel, message: bytes) -> Reply:
    channel.send(message)
    delivery = channel.receive()
    assert delivery is not None
    return decode_reply(delivery.message)


def register(channel: IpcChannel, run: str = "mnist") -> DialTicket:
    reply = ask(channel, encode_message(RegisterEndpoint(run=run, generation=7, pid=os.getpid())))
    assert isinstance(reply, DialTicket)
    return reply


def knock_of(ticket: DialTicket) -> bytes:
    return encode(Preface(target=ticket.worker, nonce=os.urandom(16)), ticket.secret)


def take(channel: IpcChannel) -> tuple[IncomingConnection, socket.socket]:
    delivery = channel.receive()
    assert delivery is not None
    assert delivery.socket is not None
    incoming = decode_reply(delivery.message)
    assert isinstance(incoming, IncomingConnection)
    delivery.socket.settimeout(60)
    return incoming, delivery.socket


def settings_at(directory: Path, **network: object) -> Settings:
    values: dict[str, object] = {"port": 0} | network
    return Settings(state=StateSettings(directory=str(directory)), network=NetworkSettings(**values))  # type: ignore[arg-type]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    listener = Running(settings_at(tmp_path))
    yield listener
    listener.stop()


def assert_silently_closed(connection: socket.socket) -> None:
    try:
        assert connection.recv(100) == b""
    except ConnectionResetError:
        pass  # closed with our bytes unread: still not a word
    finally:
        connection.close()


def test_ticket_holds_everything_for_worker(running: Running) -> None:
    channel = running.local()
    ticket = register(channel)
    assert ticket.run == "mnist"
    assert ticket.generation == 7
    assert ticket.port == running.listener.port
    assert ticket.addresses
    assert ticket.encryption == "tls"
    assert [NodeId(raw) for raw in ticket.trusted] == [running.listener.node]
    pem = ticket.credentials.certificate_pem.decode()
    identity = read_worker(ssl.PEM_cert_to_DER_cert(pem))
    assert (identity.node, identity.run, identity.worker) == (running.listener.node, "mnist", ticket.worker)
    other = running.local()
    assert register(other).worker != ticket.worker
    channel.close()
    other.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_valid_connection_reaches_worker_with_all_bytes(running: Running, host: str) -> None:
    channels = [running.local() for _ in range(3)]
    tickets = [register(channel) for channel in channels]
    for ticket, channel in zip(tickets, channels, strict=True):
        try:
            dialled = running.dial(host=host)
        except OSError:
            pytest.skip(f"no {host} here")
        dialled.sendall(knock_of(ticket) + b"what follows is TLS")
        incoming, accepted = take(channel)
        assert incoming.worker == ticket.worker
        assert incoming.peer_address.startswith("127.0.0.1:" if host == "127.0.0.1" else "[::1]:")
        assert (incoming.version_min, incoming.version_max, incoming.plaintext) == (1, 1, False)
        assert accepted.recv(100) == b"what follows is TLS"
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        accepted.sendall(b"answer")
        assert dialled.recv(100) == b"answer"
        accepted.close()
        dialled.close()
    for channel in channels:
        channel.close()


def test_preface_may_arrive_in_pieces(running: Running) -> None:
    channel = running.local()
    ticket = register(channel)
    dialled = running.dial()
    for byte in knock_of(ticket):
        dialled.sendall(bytes([byte]))
    _, accepted = take(channel)
    accepted.close()
    dialled.close()
    channel.close()


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(200, b"x"), b"\x16\x03\x01" * 60, b"BARNRAIS" + bytes(72)],
    ids=["http", "tls", "preface without a mac"],
)
def test_wrong_preface_gets_no_answer(running: Running, words: bytes) -> None:
    dialled = running.dial()
    dialled.sendall(words)
    assert_silently_closed(dialled)
    assert running.listener.keeper.refused == 1


def test_preface_of_other_cluster_gets_no_answer(running: Running) -> None:
    channel = running.local()
    ticket = register(channel)
    dialled = running.dial()
    dialled.sendall(encode(Preface(target=ticket.worker, nonce=bytes(16)), b"another secret" * 5))
    assert_silently_closed(dialled)
    channel.close()


def test_replayed_preface_gets_no_answer(running: Running) -> None:
    channel = running.local()
    knock = knock_of(register(channel))
    first = running.dial()
    first.sendall(knock)
    _, accepted = take(channel)
    second = running.dial()
    second.sendall(knock)
    assert_silently_closed(second)
    for thing in (first, accepted, channel):
        thing.close()


def test_dialler_with_secret_learns_that_worker_is_gone(running: Running) -> None:
    channel = running.local()
    ticket = register(channel)
    channel.close()
    running.until(lambda: running.listener.workers == 0)
    with running.dial() as dialled:
        dialled.sendall(knock_of(ticket))
        assert parse_answer(dialled.recv(8)).refusal == "no such worker is registered there"
        assert dialled.recv(8) == b""


def test_slow_preface_is_dropped(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorkeeper_module, "PREFACE_DEADLINE_S", 0.2)
    began = time.monotonic()
    with running.dial() as dialled:
        dialled.sendall(b"BACK")
        assert dialled.recv(1) == b""
        assert 0.1 < time.monotonic() - began < 60
    assert running.listener.keeper.waiting == 0


def test_silent_connections_do_not_block_valid_ones(running: Running) -> None:
    channel = running.local()
    ticket = register(channel)
    silent = []
    for number in range(500):
        silent.append(running.dial())
        assert running.listener.keeper.waiting <= doorkeeper_module.MOST_WAITING_PER_SOURCE
        if number % 50 == 0:
            began = time.monotonic()
            dialled = running.dial()
            dialled.sendall(knock_of(ticket))
            _, accepted = take(channel)
            assert time.monotonic() - began < 30
            accepted.close()
            dialled.close()
    running.until(lambda: running.listener.keeper.delivered == 10)
    for connection in silent:
        connection.close()
    running.until(lambda: running.listener.keeper.waiting == 0)
    channel.close()


def test_many_valid_connections_at_once_are_accepted(running: Running) -> None:
    """There are more than may wait from one source; those with a complete preface are never evicted."""
    channel = running.local()
    ticket = register(channel)
    is_busy, all_sent = threading.Event(), threading.Event()
    busy = threading.Thread(target=running.call, args=(lambda: (is_busy.set(), all_sent.wait(60)),))
    busy.start()
    assert is_busy.wait(60)  # else connections without a preface would be evicted, which is right
    dialled = [running.dial() for _ in range(100)]
    for connection in dialled:
        connection.sendall(knock_of(ticket))
    all_sent.set()
    busy.join()
    for _ in dialled:
        take(channel)[1].close()
    for connection in dialled:
        connection.close()
    channel.close()


def test_unknown_peer_is_logged_once(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            dialled = running.dial()
            dialled.sendall(b"x" * PREFACE_BYTES)
            assert_silently_closed(dialled)
        keeper = running.listener.keeper
        for number in range(1000):
            keeper._complain(str(number), "test")
    assert sum("127.0.0.1" in record.message for record in caplog.records) == 1
    assert len(keeper._named_sources) == 256
    assert len(caplog.records) == 257


def test_source_is_named_again_after_an_hour(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Tries to fill the table of sources once, so that later attackers would never be named."""
    keeper = running.listener.keeper
    for number in range(1000):
        keeper._complain(f"2001:db8::{number:x}", "test")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        keeper._complain("192.0.2.1", "test")
        assert caplog.records == []
        keeper._named_since -= 3600.0
        keeper._complain("192.0.2.1", "test")
    assert ["192.0.2.1" in record.message for record in caplog.records] == [True]


def test_listener_does_not_leak_descriptors(running: Running) -> None:
    channel = running.local()
    ticket = register(channel)

    def visit() -> None:
        with running.dial() as dialled:
            dialled.sendall(knock_of(ticket))
            take(channel)[1].close()
        with running.dial() as dialled:
            dialled.sendall(b"x" * PREFACE_BYTES)
        running.dial().close()
        running.local().close()
        refused = running.listener.keeper.refused
        running.until(lambda: len(running.listener._locals) == 1 and running.listener.keeper.waiting == 0)
        assert refused <= running.listener.keeper.refused

    visit()
    before = len(os.listdir("/dev/fd"))
    for _ in range(50):
        visit()
    running.until(lambda: len(os.listdir("/dev/fd")) <= before)
    channel.close()


def test_interface_of_run_registers_only_its_own_workers(running: Running) -> None:
    """A worker of one run asks for credentials of another run, and of none."""
    directory = running.directory / "ipc"
    directory.mkdir()
    running.call(lambda: running.listener.open_run("mnist", directory))
    connection, _ = dial_local(directory, 60)
    channel = IpcChannel(connection, takes_sockets=True)
    for other in ("another", "default"):
        request = RegisterEndpoint(run=other, generation=7, pid=os.getpid())
        reply = ask(channel, encode_message(request))
        assert isinstance(reply, RegistrationRefused)
        assert reply.message == f"this local interface serves workers of run mnist only, not of {other!r}"
    ticket = register(channel)
    with running.dial() as dialled:
        dialled.sendall(knock_of(ticket))
        take(channel)[1].close()
    person = running.local()
    register(person, "another")
    running.call(lambda: running.listener.close_run("mnist"))
    assert channel.receive() is None
    assert channel.closed, "its workers end with the run"
    assert not (directory / "listener.sock").exists()
    running.until(lambda: running.listener.workers == 1)
    person.close()
    channel.close()


def test_interface_without_secret_gives_none_to_its_workers(running: Running) -> None:
    """A worker in a sandbox would use the secret to reach the agents of other machines."""
    directory = running.directory / "ipc"
    directory.mkdir()
    running.call(lambda: running.listener.open_run("mnist", directory, has_secret=False))
    connection, _ = dial_local(directory, 60)
    channel = IpcChannel(connection, takes_sockets=True)
    ticket = register(channel)
    assert ticket.secret == b""
    channel.close()


def test_listener_reports_its_status(running: Running) -> None:
    channel = running.local()
    standing = ask(channel, encode_message(ListenerStatus()))
    assert isinstance(standing, ListenerStanding)
    assert standing.node == running.listener.node.raw
    assert (standing.port, standing.workers, standing.pid) == (running.listener.port, 0, os.getpid())
    channel.close()


def test_rejected_registration_is_explained(running: Running) -> None:
    channel = running.local()
    reply = ask(channel, encode_message(RegisterEndpoint(run="a\nb", generation=0, pid=1)))
    assert isinstance(reply, RegistrationRefused)
    assert "printable" in reply.message
    register(channel)
    reply = ask(channel, encode_message(RegisterEndpoint(run="again", generation=0, pid=1)))
    assert isinstance(reply, RegistrationRefused)
    channel.close()


@pytest.mark.parametrize(
    "words", [b"\xff" * 100, encode_frame(b"nonsense"), encode_frame(b"", has_socket=True)]
)
def test_local_garbage_disconnects_only_its_sender(running: Running, words: bytes) -> None:
    good = running.local()
    bad, _ = dial_local(running.directory, 60)
    bad.sendall(words)
    assert_silently_closed(bad)
    register(good)
    good.close()


def test_wrong_token_is_disconnected(running: Running) -> None:
    channel = running.local()
    channel.send(encode_message(ListenerStatus(token="guess")))
    assert channel.receive() is None
    assert channel.closed
    channel.close()


def test_worker_that_does_not_read_blocks_no_other(running: Running) -> None:
    stuck, good = running.local(), running.local()
    stuck_ticket, good_ticket = register(stuck), register(good)
    for _ in range(600):
        connection = running.dial()
        connection.sendall(knock_of(stuck_ticket))
        connection.close()
    with running.dial() as connection:
        connection.sendall(knock_of(good_ticket))
        take(good)[1].close()
    stuck.close()
    good.close()


def test_one_listener_per_state_directory(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barnraise.transport.listener.listener._PREDECESSOR_S", 0.1)
    with pytest.raises(ListenerError, match="another listener"):
        Running(settings_at(running.directory))
    register(channel := running.local())
    channel.close()


def test_taken_port_raises_or_uses_other_port(running: Running, tmp_path: Path) -> None:
    other = settings_at(tmp_path / "other", port=running.listener.port)
    with pytest.raises(ListenerError, match=f"port {running.listener.port} cannot be opened"):
        Running(other)
    second = Running(other, any_port=True)
    assert second.listener.port != running.listener.port
    second.stop()


def test_trust_and_addresses_come_from_the_settings(tmp_path: Path) -> None:
    friend = NodeKey.generate().id
    (tmp_path / "shared").write_bytes(b"5" * 64)
    (tmp_path / "shared").chmod(0o600)
    settings = Settings(
        state=StateSettings(directory=str(tmp_path / "state")),
        network=NetworkSettings(port=0, addresses=("203.0.113.9",), encryption="plaintext"),
        trust=TrustSettings(nodes=(str(friend).lower(), str(friend)), secret_file=str(tmp_path / "shared")),
    )
    running = Running(settings)
    channel = running.local()
    ticket = register(channel)
    assert ticket.trusted == [running.listener.node.raw, friend.raw]
    assert ticket.secret == b"\x55" * 32
    assert ticket.addresses == ["203.0.113.9"]
    assert ticket.encryption == "plaintext"
    channel.close()
    running.stop()


def test_mistyped_node_id_is_named_in_error(tmp_path: Path) -> None:
    settings = Settings(state=StateSettings(directory=str(tmp_path)), trust=TrustSettings(nodes=("ABC",)))
    with pytest.raises(IdentityError, match=r"trust\.nodes has 'ABC'"):
        Listener(settings)


def test_wait_until_idle_returns_without_connections(running: Running) -> None:
    channel = running.local()
    running.until(lambda: len(running.listener._locals) == 1)
    ended = threading.Event()

    def wait() -> None:
        running.call(lambda: running.listener.wait_until_idle(first_s=0.2, after_s=0.2))
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not ended.wait(0.5)
    channel.close()
    assert ended.wait(60)
    thread.join()
