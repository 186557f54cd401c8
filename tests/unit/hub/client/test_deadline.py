"""Total deadline: a server that sends byte by byte does not hold a member."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from barnraise.core.errors import HubAway
from barnraise.hub.client import client as client_module
from barnraise.hub.client.client import HubClient
from barnraise.hub.client.deadline import enforce_rate
from barnraise.hub.protocol.messages import RunDescription
from barnraise.hub.protocol.tls import context_for, server_context
from barnraise.hub.storage.create import hub_key
from barnraise.identity.keys import NodeKey

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n"
ANSWER_S, EVERY_S = 0.5, 0.1


@contextlib.contextmanager
def _dripping(at_once: bytes, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Start a server that sends this text and then a byte now and then; return its port."""
    is_over = threading.Event()

    def serve(line: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            context.wrap_socket(line, server_side=True) if context else line as own,
        ):
            own.recv(1 << 16)
            own.sendall(at_once)
            while not is_over.wait(EVERY_S):
                own.sendall(b"x")

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            is_over.set()
            listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("is_tls", [False, True])
@pytest.mark.parametrize("at_once", [b"HTTP/1.1 200 OK\r\nx-long: ", HEAD])
def test_response_has_total_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bytes, is_tls: bool
) -> None:
    # A handshake may take longer than an answer has here: the server is known all the same.
    monkeypatch.setattr(
        client_module, "context_for", lambda *given, **more: context_for(*given[:-1], 60.0, **more)
    )
    key = hub_key(tmp_path)
    context = server_context(tmp_path, key) if is_tls else None
    with _dripping(at_once, context) as port:
        address = f"{'https' if is_tls else 'http'}://127.0.0.1:{port}"
        client = HubClient([address], key.id, NodeKey.generate(), pinned=False, answer_s=ANSWER_S)
        for _ in range(2):
            begin = time.monotonic()
            with pytest.raises(HubAway, match="does not answer in time"):
                client.ask("GET", "/v1/run", RunDescription)
            assert time.monotonic() - begin < 20.0
        client.close()


@pytest.mark.parametrize("at_once", [b"HTTP/1.1 200 OK\r\nx-long: ", HEAD, HEAD + bytes(300_000)])
def test_slow_blob_is_reported_and_fetched_elsewhere(tmp_path: Path, at_once: bytes) -> None:
    key, tried_addresses = NodeKey.generate(), []

    class Enough(Exception):
        pass

    def sleep(seconds: float) -> None:
        tried_addresses.append(client.address)
        if len(tried_addresses) == 2:
            raise Enough

    with _dripping(at_once) as first, _dripping(at_once) as second:
        addresses = [f"http://127.0.0.1:{port}" for port in (first, second)]
        client = HubClient(addresses, key.id, NodeKey.generate(), answer_s=ANSWER_S, sleep=sleep)
        begin = time.monotonic()
        with pytest.raises(Enough):
            client.fetch("0" * 64, tmp_path / "blob", size=1_000_000)
        assert time.monotonic() - begin < 40.0
        assert tried_addresses == addresses
        client.close()


def test_slow_blob_above_minimum_rate_is_accepted() -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(100):
            clock[0] += 10.0
            yield bytes(10 * client_module._SLOWEST_BYTES_S)

    clock = [0.0]
    rate = client_module._SLOWEST_BYTES_S
    assert len(list(enforce_rate(parts(), rate, 30.0, TimeoutError, lambda: clock[0]))) == 100
    fast_then_silent = itertools.chain([bytes(1 << 30)], parts_every(29.0, clock))
    with pytest.raises(TimeoutError):
        list(enforce_rate(fast_then_silent, rate, 30.0, TimeoutError, lambda: clock[0]))


def parts_every(seconds: float, clock: list[float]) -> Iterator[bytes]:
    for _ in range(10):
        clock[0] += seconds
        yield b"x"
