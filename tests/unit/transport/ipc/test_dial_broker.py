"""Rules of the broker, and connections that it opens for a process without a network."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from barnraise.core.errors import TransportError
from barnraise.transport.ipc.dial_broker import EVERYWHERE, WEB_PORTS, DialBroker, DialRules, choose_addresses
from barnraise.transport.ipc.dial_request import (
    BROKER_VARIABLE,
    DialRequest,
    ask_broker,
    open_connection,
    take_connection,
)
from barnraise.transport.ipc.fd_passing import encode_frame
from barnraise.transport.listener.preface import encode_answer

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no broker on Windows")

WORKER = b"w" * 16
RULES = DialRules(
    workers=frozenset({("192.168.1.5", 52416)}),
    named={("hub.example", 8443): frozenset({"internet"}), ("192.168.1.9", 8443): EVERYWHERE},
    public_ports=WEB_PORTS,
)


@pytest.mark.parametrize(
    ("request_", "resolved"),
    [
        (DialRequest("192.168.1.5", 52416, WORKER), "192.168.1.5"),
        (DialRequest("hub.example", 8443), "8.8.8.8"),
        (DialRequest("192.168.1.9", 8443), "192.168.1.9"),
        (DialRequest("pypi.org", 443), "151.101.0.223"),
    ],
)
def test_choose_addresses_of_permitted_place_returns_them(request_: DialRequest, resolved: str) -> None:
    assert choose_addresses(request_, [resolved], RULES) == ((resolved,), "")


@pytest.mark.parametrize(
    ("request_", "resolved", "reason"),
    [
        (DialRequest("192.168.1.5", 52416), "192.168.1.5", "another machine's agent"),
        (DialRequest("192.168.1.6", 52416, WORKER), "192.168.1.6", "not a machine of this run"),
        (DialRequest("192.168.1.5", 22, WORKER), "192.168.1.5", "not a machine of this run"),
        (DialRequest("127.0.0.1", 52416), "127.0.0.1", "does not permit"),
        (DialRequest("127.0.0.1", 80), "127.0.0.1", "own network"),
        (DialRequest("router.example", 80), "192.168.1.1", "own network"),
        (DialRequest("mapped.example", 443), "::ffff:192.168.1.1", "own network"),
        (DialRequest("169.254.169.254", 80), "169.254.169.254", "own network"),
        (DialRequest("hub.example", 8443), "127.0.0.1", "own network"),
        (DialRequest("hub.example", 22), "8.8.8.8", "does not permit"),
        (DialRequest("mail.example", 25), "8.8.8.8", "does not permit"),
    ],
)
def test_choose_addresses_elsewhere_returns_reason(request_: DialRequest, resolved: str, reason: str) -> None:
    """Tries agents, the router, cloud metadata, a rebound name and other ports."""
    addresses, why = choose_addresses(request_, [resolved], RULES)
    assert addresses == ()
    assert reason in why


async def _in_thread(call: Callable[[], object]) -> object:
    return await asyncio.wait_for(asyncio.to_thread(call), 30)


def with_broker(tmp_path: Path, rules: DialRules, use: Callable[[DialBroker], Awaitable[None]]) -> None:
    async def run() -> None:
        broker = DialBroker(tmp_path, lambda: rules, lambda worker, plaintext: b"preface " + worker)
        broker.start()
        try:
            await use(broker)
        finally:
            broker.close()
        assert not broker.path.exists()

    asyncio.run(run())


def test_broker_passes_connection_of_permitted_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BROKER_VARIABLE, str(tmp_path / "dial.sock"))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        server.settimeout(30)
        port, closed = server.getsockname()[1], other.getsockname()[1]
        rules = DialRules(named={("127.0.0.1", port): EVERYWHERE})

        async def use(broker: DialBroker) -> None:
            def talk() -> None:
                with open_connection("127.0.0.1", port, 30) as connection:
                    accepted, _ = server.accept()
                    connection.sendall(b"hello")
                    assert accepted.recv(10) == b"hello"
                    accepted.close()
                with pytest.raises(TransportError, match=f"does not permit 127.0.0.1:{closed}"):
                    open_connection("127.0.0.1", closed, 30)

            await _in_thread(talk)

        with_broker(tmp_path, rules, use)


def test_broker_sends_preface_before_it_passes_link_of_worker(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        port = server.getsockname()[1]

        async def use(broker: DialBroker) -> None:
            def talk() -> None:
                channel = ask_broker(broker.path, DialRequest("127.0.0.1", port, WORKER))
                accepted, _ = server.accept()
                accepted.settimeout(30)
                assert accepted.recv(100) == b"preface " + WORKER
                answer = encode_answer(1)
                accepted.sendall(answer[:3])
                accepted.sendall(answer[3:])
                connection = take_connection(channel)
                assert connection is not None
                assert connection.recv(100) == answer, "the worker reads the answer itself"
                connection.close()
                accepted.close()
                channel.close()

            await _in_thread(talk)

        with_broker(tmp_path, DialRules(workers=frozenset({("127.0.0.1", port)})), use)


@pytest.mark.parametrize("banner", [b"SSH-2.0-OpenSSH", b"HTTP/1.1 400 Bad Request", b"", None])
def test_broker_keeps_the_socket_of_a_service_that_is_no_listener(
    tmp_path: Path, banner: bytes | None
) -> None:
    """Tries services that a machine of the run named as its own listener; None: its port is closed."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(30)
    port = server.getsockname()[1]
    if banner is None:
        server.close()

    async def use(broker: DialBroker) -> None:
        def talk() -> None:
            channel = ask_broker(broker.path, DialRequest("127.0.0.1", port, WORKER))
            if banner is not None:
                accepted, _ = server.accept()
                accepted.sendall(banner)
                accepted.close()
            with pytest.raises(TransportError) as raised:
                take_connection(channel)
            assert raised.value.message == f"no listener of this run answers at 127.0.0.1:{port}"
            channel.close()

        await _in_thread(talk)

    with_broker(tmp_path, DialRules(workers=frozenset({("127.0.0.1", port)})), use)
    server.close()


@pytest.mark.parametrize("message", [b"\xff\xff", b"", b"x" * 70_000], ids=["no message", "empty", "long"])
def test_broker_closes_channel_after_wrong_message(tmp_path: Path, message: bytes) -> None:
    async def use(broker: DialBroker) -> None:
        def talk() -> None:
            with socket.socket(socket.AF_UNIX) as raw:
                raw.settimeout(30)
                raw.connect(str(broker.path))
                raw.sendall(encode_frame(message))
                assert raw.recv(10) == b""

        await _in_thread(talk)

    with_broker(tmp_path, RULES, use)


def test_broker_of_unreachable_place_tells_reason(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]

        async def use(broker: DialBroker) -> None:
            def talk() -> None:
                channel = ask_broker(broker.path, DialRequest("127.0.0.1", port))
                with pytest.raises(TransportError, match="Connection refused"):
                    take_connection(channel)
                channel.close()

            await _in_thread(talk)

        with_broker(tmp_path, DialRules(named={("127.0.0.1", port): EVERYWHERE}), use)


def test_open_connection_without_broker_is_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BROKER_VARIABLE, raising=False)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        open_connection("127.0.0.1", server.getsockname()[1], 30) as connection,
    ):
        assert connection.getpeername() == server.getsockname()
