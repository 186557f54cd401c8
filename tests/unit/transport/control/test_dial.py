"""Control connections with real sockets: trust, messages, and every misuse."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import socket
import ssl
import struct
import sys
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from barnraise.core.errors import HandshakeError, ProtocolError, TransportError
from barnraise.identity import NodeKey, delegate
from barnraise.transport.control import connection
from barnraise.transport.control.agent_tls import AgentTls, HandshakeLimits
from barnraise.transport.control.dial import (
    AGENT_RUN,
    ControlConnection,
    DialOptions,
    dial_unopened,
    was_refused,
)
from barnraise.transport.control.framing import ControlFrame, ControlFrameKind, encode_control, encode_opening
from barnraise.transport.listener.preface import (
    ANSWER_BYTES,
    ANY_AGENT,
    ROUTE_AGENT,
    ROUTE_AGENT_BULK,
    Preface,
    encode,
    encode_answer,
    parse_answer,
    target_of,
)
from tests.unit.transport.listening_machines import SECRET, Machine, Street, run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="written with care, not run there yet")
Test = Callable[[Street], Coroutine[Any, Any, None]]


def on_a_street(test: Test) -> Callable[[Path], None]:
    """Run a coroutine with machines that are closed afterwards."""

    async def perform(directory: Path) -> None:
        street = Street(directory)
        try:
            await test(street)
        finally:
            await street.close()

    @functools.wraps(test)
    def wrapper(tmp_path: Path) -> None:
        run(perform(tmp_path))

    del wrapper.__wrapped__  # type: ignore[attr-defined]  # pytest reads the parameters of what it wraps
    return wrapper


async def two(street: Street) -> tuple[Machine, Machine, ControlConnection, ControlConnection]:
    left, right = await street.machine(), await street.machine()
    here = await left.dial(right)
    return left, right, here, await right.links.get()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def pass_time(seconds: float) -> None:
    """Shorten time limits that would make a test slow or dependent on this machine."""
    loop: Any = asyncio.get_running_loop()
    real = loop.time
    loop.time = lambda: real() + seconds


def knock(preface: Preface, secret: bytes = SECRET) -> bytes:
    return encode(preface, secret)


@on_a_street
async def test_dial_proves_both_nodes(street: Street) -> None:
    left, right, here, there = await two(street)
    assert (here.peer.node, here.peer.worker, here.peer.run) == (right.node, right.incarnation, AGENT_RUN)
    assert (there.peer.node, there.peer.worker) == (left.node, left.incarnation)
    assert (here.outbound, there.outbound) == (True, False)
    assert (here.address, here.port) == ("127.0.0.1", right.listener.port)
    assert there.address == "127.0.0.1"
    assert here.route == there.route == ROUTE_AGENT
    assert here.version == there.version == 1
    assert right.node.short in str(here)


@on_a_street
async def test_messages_keep_their_order_both_ways(street: Street) -> None:
    left, right, here, there = await two(street)
    messages = [b"", b"x", os.urandom(1 << 20), *(b"%d" % number for number in range(200))]
    for message in messages:
        here.send(message)
        there.send(message[::-1])
        await here.drain()
        await there.drain()
    for message in messages:
        assert await right.messages.get() == (there, message)
        assert await left.messages.get() == (here, message[::-1])


@on_a_street
async def test_message_behind_open_waits_for_owner(street: Street) -> None:
    left, right = await street.machine(), await street.machine()
    for _ in range(20):
        link = await left.dial(right)
        link.send(b"first")
        owned = await right.links.get()  # put there before any message was
        assert right.messages.empty() or owned.peer.node == left.node
        source_link, message = await right.messages.get()
        assert (source_link, message) == (owned, b"first")
        link.close("next")


@on_a_street
async def test_ping_before_open_measures_round_trip(street: Street) -> None:
    _, _, here, there = await two(street)
    rtts = await asyncio.gather(*(here.ping(60) for _ in range(10)), there.ping(60))
    assert all(0 < rtt < 60 for rtt in rtts)
    assert not here._pings


@on_a_street
async def test_pings_overtake_messages_that_wait(street: Street) -> None:
    _, right, here, there = await two(street)
    handle, before_the_ping = there._handle, []

    def note(frame: ControlFrame) -> None:
        if frame.kind is ControlFrameKind.PING:
            before_the_ping.append(right.messages.qsize())
        handle(frame)

    there._handle = note  # type: ignore[method-assign]
    here._paused = True
    for _ in range(3):
        here.send(bytes(1 << 20))
    ping = asyncio.ensure_future(here.ping(60))
    await asyncio.sleep(0)
    here._paused = False
    here._pump()
    await ping
    assert before_the_ping == [0]
    for _ in range(3):
        await right.messages.get()


@on_a_street
async def test_dial_rejects_agent_of_other_node(street: Street) -> None:
    left, right, third = [await street.machine() for _ in range(3)]
    with pytest.raises(HandshakeError, match="expected was machine"):
        await left.dial(right, expect=third.node)
    assert "disconnected before it opened" in (await right.refusals.get()).message
    with pytest.raises(HandshakeError, match="without an answer") as caught:
        await left.dial(right, target=target_of(third.node))
    assert not was_refused(caught.value)
    assert (await left.dial(right, target=ANY_AGENT, expect=None)).peer.node == right.node


@on_a_street
async def test_untrusted_node_is_named_on_both_sides(street: Street) -> None:
    left = await street.machine()
    stranger = await street.machine(stranger=True)
    with pytest.raises(HandshakeError, match="not trusted here") as caught:
        await left.dial(stranger)
    assert "Pair" in caught.value.hint
    await stranger.refusals.get()
    stranger.friends.add(left.node)
    with pytest.raises(HandshakeError, match="does not trust this machine") as caught:
        await stranger.dial(left)
    assert f"127.0.0.1:{left.listener.port}" in caught.value.message
    assert "not trusted here" in (await left.refusals.get()).message
    assert left.links.empty()


@on_a_street
async def test_trust_is_checked_at_each_dial(street: Street) -> None:
    left = await street.machine()
    other = await street.machine(stranger=True)
    for _ in range(2):
        with pytest.raises(HandshakeError):
            await left.dial(other)
        left.friends.add(other.node)
        other.friends.add(left.node)
        link = await left.dial(other)
        assert await link.ping(60) > 0
        contexts = left.tls._client
        await left.dial(other)
        assert left.tls._client is contexts  # the same trust: nothing is built again
        left.friends.discard(other.node)
        other.friends.discard(left.node)


@on_a_street
async def test_node_revoked_during_handshake_is_rejected(street: Street) -> None:
    left, right = await street.machine(), await street.machine()
    link = await left.dial_unopened(right)
    right.friends.discard(left.node)
    link.begin(**left.callbacks())
    assert "not trusted any more" in (await right.refusals.get()).message
    _, why = await left.ends.get()
    assert "closed" in why or "ended" in why


@on_a_street
async def test_worker_of_trusted_node_is_rejected_as_agent(street: Street) -> None:
    left = await street.machine()
    worker = await street.machine(run="mnist")
    with pytest.raises(HandshakeError, match=r"ended the handshake|broke off"):
        await worker.dial(left)
    assert "not of run '@agent'" in (await left.refusals.get()).message
    with pytest.raises(HandshakeError, match="not of run '@agent'"):
        await left.dial(worker)


@on_a_street
async def test_wrong_secret_gets_no_answer(street: Street) -> None:
    left, right = await street.machine(), await street.machine()
    with pytest.raises(HandshakeError, match="without an answer") as caught:
        await left.dial(right, secret=b"w" * 32)
    assert "cluster" in caught.value.hint
    assert right.links.empty()
    assert right.refusals.empty()
    right.word = b"w" * 32  # the secret is read again for each connection
    await left.dial(right, secret=b"w" * 32)


@on_a_street
async def test_was_refused_is_true_for_refusal_not_silence(street: Street) -> None:
    left, right = await street.machine(), await street.machine()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dialling = asyncio.ensure_future(left.dial(right, port=silent.getsockname()[1]))
        silent.setblocking(False)
        taken, _ = await asyncio.get_running_loop().sock_accept(silent)
        await asyncio.get_running_loop().sock_recv(taken, 1)  # it has knocked
        pass_time(60)
        with pytest.raises(TransportError, match="waited 60 s for an answer to the preface") as caught:
            await dialling
        taken.close()
        assert not was_refused(caught.value)
        port = silent.getsockname()[1]
    with pytest.raises(TransportError, match="refuses the connection") as caught:
        await left.dial(right, port=port)
    assert was_refused(caught.value)
    assert "barnraise up" in caught.value.hint


@pytest.mark.parametrize("address", ["localhost", "", "x" * 5000, "192.0.2.1.5", "a\0b", "127.0.0.1:80"])
def test_dial_rejects_host_names(address: str, tmp_path: Path) -> None:
    async def dial() -> None:
        tls = AgentTls(delegate(NodeKey.generate(), run=AGENT_RUN, worker=bytes(16)), tuple)
        with pytest.raises(TransportError, match="not an address") as caught:
            await dial_unopened(address, 1, DialOptions(ROUTE_AGENT, ANY_AGENT, SECRET, tls, expect=None))
        assert len(caught.value.message) < 400

    run(dial())


@on_a_street
async def test_port_of_other_program_is_recognized(street: Street) -> None:
    left, right = await street.machine(), await street.machine()
    answers = [b"HTTP/1.1 400 Bad Request\r\n", encode_answer(9), encode_answer(1, plaintext=True), b"BYO"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(80)
        writer.write(answers.pop(0))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for _ in range(4):
        with pytest.raises((ProtocolError, HandshakeError), match=str(port)):
            await left.dial(right, port=port)
    server.close()


async def handshake(left: Machine, right: Machine, preface: Preface) -> tuple[socket.socket, Any]:
    """Do by hand what dialling does, so that a test can misbehave afterwards."""
    loop = asyncio.get_running_loop()
    raw = socket.create_connection(("127.0.0.1", right.listener.port))
    raw.setblocking(False)
    await loop.sock_sendall(raw, knock(preface))
    assert parse_answer(await loop.sock_recv(raw, ANSWER_BYTES)).version == 1
    session = left.tls.session(server_side=False)
    while not session.handshake():
        await loop.sock_sendall(raw, session.outgoing())
        session.feed(await loop.sock_recv(raw, 16384))
    await loop.sock_sendall(raw, session.outgoing())
    return raw, session


BULK = Preface(ANY_AGENT, bytes(16), ROUTE_AGENT_BULK)
WRONG_FRAMES = {
    "oversized": (encode_opening(BULK, 1) + struct.pack("<IB", (8 << 20) + 1, 0), "claims"),
    "unknown kind": (encode_opening(BULK, 1) + struct.pack("<IB", 0, 9), "kind 9"),
    "short ping": (struct.pack("<IB", 7, 1), "ping of 7 bytes"),
    "message first": (encode_control(ControlFrameKind.MESSAGE, b"hello"), "before the link was open"),
    "opened twice": (encode_opening(BULK, 1) * 2, "opened twice"),
    "another route": (encode_opening(Preface(ANY_AGENT, bytes(16)), 1), "different prefaces"),
    "another version": (encode_opening(BULK, 2), "different prefaces"),
}


@pytest.mark.parametrize("name", WRONG_FRAMES)
def test_wrong_frames_close_connection_with_reason(name: str, tmp_path: Path) -> None:
    words, reason = WRONG_FRAMES[name]

    @on_a_street
    async def misbehave(street: Street) -> None:
        left, right = await street.machine(), await street.machine()
        raw, session = await handshake(left, right, Preface(ANY_AGENT, os.urandom(16), ROUTE_AGENT_BULK))
        await asyncio.get_running_loop().sock_sendall(raw, session.encrypt(words))
        ended = asyncio.ensure_future(right.ends.get())
        refused = asyncio.ensure_future(right.refusals.get())
        done, pending = await asyncio.wait({ended, refused}, return_when=asyncio.FIRST_COMPLETED)
        for waiter in pending:
            waiter.cancel()
        if ended in done:
            link, why = ended.result()
            assert link.closed == why
        else:
            why = refused.result().message
        assert reason in why
        while await asyncio.get_running_loop().sock_recv(raw, 1024):
            pass
        raw.close()

    misbehave(tmp_path)


@on_a_street
async def test_garbage_after_handshake_closes_connection(street: Street) -> None:
    left, right = await street.machine(), await street.machine()
    raw, session = await handshake(left, right, Preface(ANY_AGENT, os.urandom(16), ROUTE_AGENT))
    loop = asyncio.get_running_loop()
    opening = encode_opening(Preface(ANY_AGENT, bytes(16), ROUTE_AGENT), 1)
    await loop.sock_sendall(raw, session.encrypt(opening + encode_control(ControlFrameKind.MESSAGE, b"good")))
    assert (await right.messages.get())[1] == b"good"
    await loop.sock_sendall(raw, b"\x17\x03\x03\x00\x40" + os.urandom(64))
    assert "TLS does not allow" in (await right.ends.get())[1]
    raw.close()


@on_a_street
async def test_garbage_instead_of_tls_is_rejected(street: Street) -> None:
    right = await street.machine()
    loop = asyncio.get_running_loop()
    raw = socket.create_connection(("127.0.0.1", right.listener.port))
    raw.setblocking(False)
    await loop.sock_sendall(raw, knock(Preface(ANY_AGENT, os.urandom(16), ROUTE_AGENT)) + b"x" * 500)
    assert "TLS handshake" in (await right.refusals.get()).message
    raw.close()


@on_a_street
async def test_plaintext_and_unknown_versions_are_rejected(street: Street) -> None:
    right = await street.machine()
    loop = asyncio.get_running_loop()
    for preface, heard in (
        (
            Preface(ANY_AGENT, os.urandom(16), ROUTE_AGENT, version_min=7, version_max=9),
            "no common protocol version",
        ),
        (Preface(ANY_AGENT, os.urandom(16), ROUTE_AGENT, plaintext=True), None),
        (Preface(ANY_AGENT, os.urandom(16), 77), None),
    ):
        raw = socket.create_connection(("127.0.0.1", right.listener.port))
        raw.setblocking(False)
        await loop.sock_sendall(raw, knock(preface))
        answer = await loop.sock_recv(raw, 100)
        if heard is None:
            assert answer == b""
        else:
            assert heard in (parse_answer(answer).refusal or "")
        raw.close()
        assert await right.refusals.get()


@on_a_street
async def test_stalled_handshakes_are_bounded_in_number_and_time(street: Street) -> None:
    left, right = await street.machine(), await street.machine()
    right.tls.handshakes = HandshakeLimits(total=6, per_source=4)
    loop = asyncio.get_running_loop()
    stalled = []
    for _ in range(10):
        raw = socket.create_connection(("127.0.0.1", right.listener.port))
        raw.setblocking(False)
        await loop.sock_sendall(raw, knock(Preface(ANY_AGENT, os.urandom(16), ROUTE_AGENT)))
        stalled.append(raw)
    for _ in range(6):
        assert "too many handshakes" in (await right.refusals.get()).message
    assert len(right.tls.handshakes) == 4
    pass_time(60)
    for _ in range(4):
        assert "waited 60 s for the end of the TLS handshake" in (await right.refusals.get()).message
    for raw in stalled:
        while await loop.sock_recv(raw, 100):
            pass
        raw.close()
    assert len(right.tls.handshakes) == 0
    await left.dial(right)


@on_a_street
async def test_connection_that_never_opens_times_out(street: Street) -> None:
    left, right = await street.machine(), await street.machine()
    link = await left.dial_unopened(right)
    pass_time(60)
    assert "waited 60 s for the opening" in (await right.refusals.get()).message
    await until(lambda: link.closed is not None)
    with pytest.raises(TransportError):
        link.begin(**left.callbacks())
    assert len(right.tls.handshakes) == 0
    assert left.ends.empty()


@on_a_street
async def test_peer_that_does_not_read_is_closed(street: Street) -> None:
    left, _, here, there = await two(street)
    assert there._transport is not None
    there._transport.pause_reading()
    with pytest.raises(ProtocolError, match="too long for its link"):
        here.send(bytes((1 << 20) + 1))
    sent = 0
    while here.closed is None:
        here.send(bytes(1 << 20))
        assert here.queued <= 4 << 20
        sent += 1
        await asyncio.sleep(0)
    assert 3 < sent < 40
    assert here.closed == "does not read what we send"
    assert await left.ends.get() == (here, here.closed)
    here.send(b"dropped")
    with pytest.raises(TransportError, match="does not read"):
        await here.ping(1)
    with pytest.raises(TransportError, match="does not read"):
        await here.drain()


@on_a_street
async def test_bulk_passes_with_drain(street: Street) -> None:
    left, right = await street.machine(), await street.machine()
    link = await left.dial(right, route=ROUTE_AGENT_BULK)
    for number in range(8):
        link.send(bytes([number]) * (8 << 20))
        await link.drain()
        assert link.queued <= (1 << 20) + connection._PIECE * 3
    for number in range(8):
        _, message = await right.messages.get()
        assert len(message) == 8 << 20
        assert message[0] == message[-1] == number
    assert link.closed is None


class _BreaksWhenDrained:
    """Socket that breaks at the first send after the queue was drained."""

    def __init__(self, link: ControlConnection, real: socket.socket) -> None:
        self._link = link
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def send(self, data: bytes) -> int:
        if not self._link._paused:
            raise BrokenPipeError
        return self._real.send(data)


@on_a_street
async def test_connection_that_breaks_while_draining_closes_once(street: Street) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    _, _, here, there = await two(street)
    assert there._transport is not None
    there._transport.pause_reading()
    while not here._paused:
        here.send(bytes(1 << 16))
        await asyncio.sleep(0)
    stream: Any = here._transport
    stream._sock = _BreaksWhenDrained(here, stream._sock)
    there._transport.resume_reading()
    await until(lambda: here.closed is not None)
    await asyncio.sleep(0.05)
    assert complaints == []


@on_a_street
async def test_drain_has_a_deadline(street: Street) -> None:
    left, right = await street.machine(), await street.machine()
    link = await left.dial(right, route=ROUTE_AGENT_BULK)
    there = await right.links.get()
    assert there._transport is not None
    there._transport.pause_reading()
    for _ in range(3):
        link.send(bytes(8 << 20))
    with pytest.raises(TransportError, match=r"not read enough within 0\.2 s"):
        await link.drain(0.2)
    with pytest.raises(TransportError, match=r"did not answer a ping within 0\.1 s"):
        await link.ping(0.1)
    assert not link._pings


@on_a_street
async def test_close_calls_on_closed_once_on_both_sides(street: Street) -> None:
    left, right, here, there = await two(street)
    ping = asyncio.ensure_future(there.ping(60))
    here.close("enough")
    here.close("twice")
    assert here.closed == "enough"
    assert await left.ends.get() == (here, "enough")
    assert await right.ends.get() == (there, "the other side closed the link")
    with pytest.raises(TransportError):
        await ping
    await asyncio.sleep(0.05)
    assert left.ends.empty()
    assert right.ends.empty()


def test_close_with_flush_sends_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FLUSH_S", 60.0)  # however slow this machine is at the moment

    @on_a_street
    async def leave(street: Street) -> None:
        left, right, here, there = await two(street)
        for _ in range(10):
            there.send(b"unread" * 1000)  # what we have not read must not turn our goodbye into a reset
        here.send(bytes(1 << 20))
        here.send(b"goodbye")
        here.close("leaving", flush=True)
        assert (await left.ends.get())[1] == "leaving"
        assert len((await right.messages.get())[1]) == 1 << 20
        assert (await right.messages.get())[1] == b"goodbye"
        assert (await right.ends.get())[1] == "the other side closed the link"

    leave(tmp_path)


@on_a_street
async def test_close_with_flush_is_bounded_in_time(street: Street) -> None:
    _, right, here, there = await two(street)
    assert there._transport is not None
    there._transport.pause_reading()
    while here.queued < 2 << 20:
        here.send(bytes(1 << 19))
    here.close("leaving", flush=True)
    assert here.attached
    await until(lambda: not here.attached)
    there._transport.resume_reading()
    _, why = await right.ends.get()
    assert "without a goodbye" in why or "reset" in why


@on_a_street
async def test_error_of_owner_closes_only_its_connection(street: Street) -> None:
    left, right = await street.machine(), await street.machine()

    def complain(link: ControlConnection, message: bytes) -> None:
        if message == b"bug":
            raise ZeroDivisionError
        raise ProtocolError("this makes no sense")

    other = await left.dial(right)
    ended: asyncio.Queue[str] = asyncio.Queue()
    right.callbacks = lambda: {  # type: ignore[method-assign]
        "on_message": complain,
        "on_closed": lambda link, why: ended.put_nowait(why),
    }
    for message, why in ((b"bug", "our side failed"), (b"?", "this makes no sense")):
        link = await left.dial(right)
        link.send(message)
        assert why in await ended.get()
        assert (await left.ends.get())[0] is link
    assert await other.ping(60) > 0


@on_a_street
async def test_rejected_message_is_not_kept(street: Street) -> None:
    """The message does not wait for garbage collection, which counts objects, not bytes."""
    left, right = await street.machine(), await street.machine()
    seen: list[weakref.ref[set[bytes]]] = []

    def complain(link: ControlConnection, message: bytes) -> None:
        decoded = {message}
        seen.append(weakref.ref(decoded))
        try:
            raise ValueError(decoded)
        except ValueError as error:
            raise ProtocolError("this makes no sense") from error

    ended: asyncio.Queue[ControlConnection] = asyncio.Queue()
    right.callbacks = lambda: {  # type: ignore[method-assign]
        "on_message": complain,
        "on_closed": lambda link, why: ended.put_nowait(link),
    }
    gc.disable()
    try:
        (await left.dial(right)).send(b"?")
        link = await ended.get()
        assert link.closed == "this makes no sense"
        await until(lambda: not link.attached)
        assert seen[0]() is None
    finally:
        gc.enable()


@on_a_street
async def test_many_links_at_once(street: Street) -> None:
    hub = await street.machine()
    hub.tls.handshakes = HandshakeLimits(per_source=64)
    others = [await street.machine() for _ in range(6)]
    links = await asyncio.gather(*(other.dial(hub) for other in others for _ in range(5)))
    for number, link in enumerate(links):
        link.send(b"%d" % number)
    heard = [await hub.messages.get() for _ in links]
    assert sorted(int(message) for _, message in heard) == list(range(len(links)))
    for link, message in heard:
        assert link.peer.node == others[int(message) // 5].node
        link.send(message)
    for number in range(len(links)):
        source_link, message = await others[number // 5].messages.get()
        assert links[int(message)] is source_link
    assert await asyncio.gather(*(link.ping(60) for link in links))


@on_a_street
async def test_connections_do_not_leak_descriptors(street: Street) -> None:
    left, right = await street.machine(), await street.machine()
    stranger = await street.machine(stranger=True)

    async def visit() -> None:
        link = await left.dial(right)
        (await right.links.get()).close("done")
        await left.ends.get()
        assert link.closed is not None
        for attempt in (stranger.dial(right), left.dial(right, secret=b"w" * 32)):
            with pytest.raises(TransportError):
                await attempt
        await right.refusals.get()
        with pytest.raises(TransportError):
            await left.dial(right, port=1)

    await visit()
    before = len(os.listdir("/dev/fd"))
    for _ in range(10):
        await visit()
    await until(lambda: len(os.listdir("/dev/fd")) <= before)


@on_a_street
async def test_control_sockets_are_tuned(street: Street) -> None:
    _, _, here, there = await two(street)
    for link in (here, there):
        assert link._transport is not None
        raw = link._transport.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if sys.platform == "linux":
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
            assert raw.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 0xB8
        tls = link._session.object
        assert tls.version() == "TLSv1.3"
        assert isinstance(tls, ssl.SSLObject)
        assert tls.server_hostname is None


def test_handshake_limits_count_per_source() -> None:
    room = HandshakeLimits(total=3, per_source=2)
    assert [room.enter(source) for source in "aaabb"] == [True, True, False, True, False]
    assert len(room) == 3
    room.leave("a")
    assert room.enter("b")
    for source in "abb":
        room.leave(source)
    assert len(room) == 0
    assert not room._sources
