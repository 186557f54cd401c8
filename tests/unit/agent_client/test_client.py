"""Registration at the listener, and workers that start the listener themselves."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from barnraise.agent_client import ListenerClient, ensure_listener, register_worker
from barnraise.agent_client import bootstrap as starting_module
from barnraise.agent_client.bootstrap import standing_of
from barnraise.core.config import NetworkSettings, Settings, StateSettings
from barnraise.core.errors import ListenerError, ProtocolError
from barnraise.transport.ipc.fd_passing import IpcChannel
from barnraise.transport.ipc.local_socket import LocalListener
from barnraise.transport.ipc.messages import (
    IncomingConnection,
    ListenerStatus,
    RegistrationRefused,
    encode_message,
)
from barnraise.transport.listener.preface import Preface, encode, encode_answer, parse_answer

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="written with care, not run there yet")


def settings_at(directory: Path, port: int = 0) -> Settings:
    return Settings(state=StateSettings(directory=str(directory)), network=NetworkSettings(port=port))


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    standing = standing_of(tmp_path) if (tmp_path / "listener.sock").exists() else None
    if standing is not None:
        os.kill(standing.pid, signal.SIGTERM)


def is_readable(client: ListenerClient) -> bool:
    """Wait until a client can be read. `select.select` would refuse descriptors from 1024 on."""
    with selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ)
        return bool(selector.select(60))


def test_registered_worker_is_reached(state: Path) -> None:
    client, ticket = register_worker(settings_at(state), "mnist", 4)
    assert (ticket.run, ticket.generation) == ("mnist", 4)
    assert client.receive() is None
    dialled = socket.create_connection(("127.0.0.1", ticket.port), timeout=60)
    dialled.sendall(encode(Preface(target=ticket.worker, nonce=os.urandom(16)), ticket.secret))
    assert is_readable(client)
    received = client.receive()
    assert received is not None
    incoming, accepted = received
    assert incoming.worker == ticket.worker
    assert not accepted.getblocking()
    assert client.receive() is None
    accepted.sendall(encode_answer(1))
    assert parse_answer(dialled.recv(8)).version == 1
    for resource in (dialled, accepted, client):
        resource.close()


def test_refusal_is_raised_with_its_hint(state: Path) -> None:
    with pytest.raises(ListenerError, match="printable") as caught:
        register_worker(settings_at(state), "a\nb", 0)
    assert caught.value.hint == "Choose another name for the run."


def test_without_a_listener_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(ListenerError, match="no listener answers"):
        ListenerClient.connect(tmp_path, timeout=1)
    assert standing_of(tmp_path) is None


def test_socket_file_of_dead_listener_is_replaced(state: Path) -> None:
    ensure_listener(settings_at(state))
    first = standing_of(state)
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    starting_module._started[-1].wait()
    assert (state / "listener.sock").exists()
    client, _ = register_worker(settings_at(state), "mnist", 0)
    second = standing_of(state)
    assert second is not None
    assert second.pid != first.pid
    assert second.node == first.node
    client.close()


def test_worker_detects_stopped_listener(state: Path) -> None:
    client, _ = register_worker(settings_at(state), "mnist", 0)
    standing = standing_of(state)
    assert standing is not None
    os.kill(standing.pid, signal.SIGTERM)
    assert is_readable(client)
    with pytest.raises(ListenerError, match="has stopped"):
        client.receive()
    client.close()
    process = starting_module._started[-1]
    assert process.wait(90) == 0


def test_idle_listener_stops_by_itself(state: Path) -> None:
    client, _ = register_worker(settings_at(state), "mnist", 0)
    process = starting_module._started[-1]
    time.sleep(2.5)
    assert process.poll() is None
    began = time.monotonic()
    client.close()
    assert process.wait(60) == 0
    assert time.monotonic() - began > 1.5
    assert not (state / "listener.sock").exists()


def test_eight_workers_at_once_start_one_listener(state: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from barnraise.core.config import *; from barnraise.agent_client import *\n"
        "from barnraise.agent_client.bootstrap import standing_of\n"
        "s = Settings(state=StateSettings(directory=sys.argv[1]), network=NetworkSettings(port=0))\n"
        "c, t = register_worker(s, 'mnist', 0)\n"
        "print(standing_of(Path(sys.argv[1])).pid, t.worker.hex(), flush=True); sys.stdin.read()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(state)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        for _ in range(8)
    ]
    printed = []
    for worker in workers:
        assert worker.stdout is not None
        printed.append(worker.stdout.readline().split())
    standing = standing_of(state)
    for worker in workers:
        worker.communicate()
    assert standing is not None
    assert standing.workers == 8
    assert {int(pid) for pid, _ in printed} == {standing.pid}
    assert len({worker for _, worker in printed}) == 8


def test_listener_on_taken_port_uses_another(state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        client, ticket = register_worker(settings_at(state, port), "mnist", 0)
        assert ticket.port != port
        client.close()
    assert f"port {port} is taken" in (state / "listener.log").read_text()


def test_listener_that_cannot_start_is_quoted(state: Path) -> None:
    (state / "node.key").write_text("no key")
    (state / "node.key").chmod(0o600)
    with pytest.raises(ListenerError, match="readable private key"):
        ensure_listener(settings_at(state))


def test_hanging_listener_times_out(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door = LocalListener(state)
    monkeypatch.setattr(starting_module, "_PROBE_S", 0.1)
    assert standing_of(state) is None
    door.close()


def test_silent_listener_is_waited_for(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_listener(settings_at(state))
    standing = standing_of(state)
    assert standing is not None

    def start(*_: object) -> None:
        raise AssertionError("another listener was started")

    monkeypatch.setattr(starting_module, "_PROBE_S", 0.1)
    monkeypatch.setattr(starting_module, "_start", start)
    os.kill(standing.pid, signal.SIGSTOP)
    wake = threading.Timer(1.0, os.kill, (standing.pid, signal.SIGCONT))
    wake.start()
    client, _ = register_worker(settings_at(state), "mnist", 0)
    wake.join()
    client.close()
    monkeypatch.setattr(starting_module, "_PROBE_S", 5.0)


def test_user_files_do_not_shadow_standard_modules(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (state / "asyncio.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(state)
    ensure_listener(settings_at(state))


def test_unasked_messages_are_protocol_errors() -> None:
    left, right = socket.socketpair()
    client, listener = ListenerClient(IpcChannel(left, takes_sockets=True), ""), IpcChannel(right)
    listener.send(encode_message(RegistrationRefused("what?", "nothing")))
    with pytest.raises(ProtocolError, match="Refused unasked"):
        client.receive()
    listener.send(encode_message(IncomingConnection(b"W" * 16, "192.0.2.1:5", 1, 1, False)))
    with pytest.raises(ProtocolError, match="unasked"):
        client.receive()
    listener.send(encode_message(IncomingConnection(b"W" * 16, "192.0.2.1:5", 1, 1, False)))
    with pytest.raises(ProtocolError, match="instead of a ticket"):
        client.register("mnist", 0)
    kept, passed = socket.socketpair()
    listener.send_socket(encode_message(ListenerStatus()), passed, os.getpid())
    passed.close()
    with pytest.raises(ProtocolError):
        client.receive()
    assert kept.recv(1) == b""  # the socket that came with nonsense was closed
    for resource in (kept, client, listener):
        resource.close()


def test_listener_does_not_import_torch() -> None:
    program = (
        "import sys; import barnraise.agent_client, barnraise.transport.listener.listener; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == 0
