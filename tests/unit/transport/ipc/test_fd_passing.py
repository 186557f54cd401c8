"""Passing of messages and sockets between local processes, in order and without leaks."""

from __future__ import annotations

import array
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import ListenerError, ProtocolError
from barnraise.transport.ipc.fd_passing import LARGEST_MESSAGE, IpcChannel, IpcFrameReader, encode_frame

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="descriptors; Windows shares sockets by pid")


@pytest.fixture
def channels() -> Iterator[tuple[IpcChannel, IpcChannel]]:
    left, right = socket.socketpair()
    left.settimeout(60)
    right.settimeout(60)
    sender, receiver = IpcChannel(left), IpcChannel(right, takes_sockets=True)
    yield sender, receiver
    sender.close()
    receiver.close()


def count_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def test_messages_and_sockets_keep_their_order(channels: tuple[IpcChannel, IpcChannel]) -> None:
    sender, receiver = channels
    pairs = [socket.socketpair() for _ in range(5)]
    for number, (kept, passed) in enumerate(pairs):
        sender.send(b"plain %d" % number)
        sender.send_socket(b"socket %d" % number, passed, os.getpid())
        passed.close()
        kept.sendall(b"%d" % number)
    for number in range(5):
        plain = receiver.receive()
        assert plain is not None
        assert (plain.message, plain.socket) == (b"plain %d" % number, None)
        with_socket = receiver.receive()
        assert with_socket is not None
        assert with_socket.message == b"socket %d" % number
        assert with_socket.socket is not None
        assert not with_socket.socket.get_inheritable()
        assert with_socket.socket.recv(10) == b"%d" % number
        with_socket.socket.close()
    for kept, _ in pairs:
        kept.close()


def test_other_process_receives_socket(channels: tuple[IpcChannel, IpcChannel]) -> None:
    left, right = socket.socketpair()
    program = (
        "import socket, sys; from barnraise.transport.ipc.fd_passing import IpcChannel; "
        "d = IpcChannel(socket.socket(fileno=int(sys.argv[1])), takes_sockets=True).receive(); "
        "d.socket.sendall(d.message + b'!')"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(right.fileno())]
    with subprocess.Popen(command, pass_fds=[right.fileno()], env=environment) as child, left, right:
        kept, passed = socket.socketpair()
        IpcChannel(left).send_socket(b"hello", passed, child.pid)
        passed.close()
        kept.settimeout(60)
        with kept:
            assert kept.recv(10) == b"hello!"


def test_nonblocking_channel_receives_nothing_then_all(
    channels: tuple[IpcChannel, IpcChannel],
) -> None:
    sender, receiver = channels
    receiver.setblocking(False)
    assert receiver.receive() is None
    assert not receiver.closed
    sender.send(b"a")
    sender.send(b"b")
    received = [receiver.receive() for _ in range(3)]
    assert [delivery and delivery.message for delivery in received] == [b"a", b"b", None]
    sender.close()
    assert receiver.receive() is None
    assert receiver.closed


def test_reader_that_is_behind_gets_no_partial_frame() -> None:
    left, right = socket.socketpair()
    left.setblocking(False)
    sender = IpcChannel(left)

    def send_much() -> None:
        for _ in range(10_000):
            sender.send(b"x" * 1000)

    with pytest.raises((BlockingIOError, ListenerError)):
        send_much()
    receiver = IpcChannel(right)
    right.setblocking(False)
    while (delivery := receiver.receive()) is not None:
        assert delivery.message == b"x" * 1000
    sender.close()
    receiver.close()


def test_unread_sockets_are_closed_with_the_channel(channels: tuple[IpcChannel, IpcChannel]) -> None:
    sender, receiver = channels
    before = count_descriptors()
    kept, passed = socket.socketpair()
    sender.send_socket(b"first", passed, os.getpid())
    sender.send_socket(b"second", passed, os.getpid())
    passed.close()
    first = receiver.receive()
    assert first is not None
    assert first.socket is not None
    first.socket.close()
    kept.close()
    sender.close()
    receiver.close()
    assert count_descriptors() <= before - 2


def test_channel_without_sockets_closes_received_ones() -> None:
    left, right = socket.socketpair()
    sender, receiver = IpcChannel(left), IpcChannel(right)
    kept, passed = socket.socketpair()
    sender.send_socket(b"unwanted", passed, os.getpid())
    passed.close()
    before = count_descriptors()
    with pytest.raises(ProtocolError, match="unexpected socket"):
        receiver.receive()
    assert count_descriptors() <= before
    for thing in (sender, receiver, kept):
        thing.close()


def test_missing_or_wrong_socket_raises_protocol_error(channels: tuple[IpcChannel, IpcChannel]) -> None:
    sender, receiver = channels
    sender._connection.sendall(encode_frame(b"where is it?", has_socket=True))
    with pytest.raises(ProtocolError, match="without its socket"):
        receiver.receive()
    read, write = os.pipe()
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [read]))
    before = count_descriptors()
    sender._connection.sendmsg([encode_frame(b"a pipe", has_socket=True)], [rights])
    with pytest.raises(ProtocolError, match="not a socket"):
        receiver.receive()
    assert count_descriptors() <= before
    os.close(read)
    os.close(write)


def test_flood_of_descriptors_raises_protocol_error(channels: tuple[IpcChannel, IpcChannel]) -> None:
    sender, receiver = channels
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 30))
    before = count_descriptors()
    sender._connection.sendmsg([b"x"], [rights])
    with pytest.raises(ProtocolError, match="more sockets"):
        receiver.receive()
    receiver.close()
    assert count_descriptors() <= before


def test_frame_lengths_are_bounded() -> None:
    frames = IpcFrameReader()
    frames.feed(b"\xff" * 8)
    with pytest.raises(ProtocolError, match="claims"):
        frames.next()
    with pytest.raises(ProtocolError, match="too long"):
        encode_frame(b"x" * (LARGEST_MESSAGE + 1))


@given(st.lists(st.tuples(st.binary(max_size=50), st.booleans()), max_size=5), st.integers(1, 20))
def test_ipc_frames_decode_for_any_cuts(messages: list[tuple[bytes, bool]], step: int) -> None:
    wire = b"".join(encode_frame(message, has_socket=attached) for message, attached in messages)
    frames, decoded = IpcFrameReader(), []
    for start in range(0, len(wire), step):
        frames.feed(wire[start : start + step])
        while (frame := frames.next()) is not None:
            decoded.append((frame.message, frame.has_socket))
    assert decoded == messages


@given(st.binary(max_size=300))
def test_any_bytes_give_ipc_frames_or_protocol_error(data: bytes) -> None:
    frames = IpcFrameReader()
    frames.feed(data)
    try:
        while frames.next() is not None:
            pass
    except ProtocolError:
        pass
