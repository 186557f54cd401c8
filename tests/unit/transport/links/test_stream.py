"""Link over a socket: options, close reasons, and pieces of any size."""

from __future__ import annotations

import errno
import socket
import ssl
import sys

import pytest

from barnraise.transport.links.frames import FrameHeader, FrameKind
from barnraise.transport.links.stream import StreamLink, _reason, tune
from tests.contract.link_pairs import Owner, sockets


def test_stream_socket_is_tuned() -> None:
    left, right = sockets()
    with left, right:
        tune(left, silence_s=5.0)
        assert left.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert left.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert left.getblocking() is False
        if sys.platform == "linux":
            assert left.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
            assert left.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5


def test_stream_socket_is_tuned_where_options_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, whose kernel also refuses a number that Python has no name for."""
    for name in ("TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "TCP_NOTSENT_LOWAT"):
        monkeypatch.delattr(socket, name, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    left, right = sockets()
    with left, right:
        tune(left, silence_s=5.0)
        assert left.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert left.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionResetError(), "its connection was reset"),
        (BrokenPipeError(), "its connection was reset"),
        (ssl.SSLEOFError(), "the other side closed the connection"),
        (TimeoutError(), "the network stopped delivering to it"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "No route to host"),
    ],
)
def test_close_reasons_are_readable(error: OSError, words: str) -> None:
    assert _reason(error) == words


def test_connection_reset_is_close_reason() -> None:
    left, right = sockets()
    link = StreamLink(left, Owner())
    tune(left, silence_s=5.0)
    right.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    right.close()
    while link.closed is None:
        link.receive()
    assert "reset" in link.closed or "closed" in link.closed
    link.close("again")


def test_single_bytes_become_frames() -> None:
    left, right = sockets()
    tune(right, silence_s=5.0)
    owner = Owner()
    link = StreamLink(right, owner)
    wire = b"".join(
        FrameHeader(FrameKind.DATA, 30, 1, 0, number).encode() + bytes([number]) * 30 for number in range(5)
    )
    for byte in wire:
        before = link.bytes_in
        left.sendall(bytes([byte]))
        while link.bytes_in == before:
            link.receive()
    assert [(header.first, payload) for header, payload in owner.frames] == [
        (number, bytes([number]) * 30) for number in range(5)
    ]
    left.close()
    link.close("done")


def _wake_threshold_within_large_frame() -> int:
    left, right = sockets()
    tune(right, silence_s=5.0)
    owner = Owner()
    link = StreamLink(right, owner)
    left.sendall(FrameHeader(FrameKind.DATA, 1 << 20, 1).encode() + bytes(1000))
    while link.bytes_in < 1000:
        link.receive()
    threshold = right.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
    assert link.sleeps_through is (threshold > 1)
    left.sendall(bytes(500))  # too few to wake the loop, which reads them all the same when it polls
    before = link.bytes_in
    while link.bytes_in == before:
        link.receive()
    left.close()
    link.close("done")
    return threshold


@pytest.mark.skipif(sys.platform != "linux", reason="the threshold is Linux's")
def test_large_frame_wakes_loop_for_many_bytes_at_once() -> None:
    assert _wake_threshold_within_large_frame() > 10_000


def test_large_frame_of_macos_wakes_loop_for_every_packet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert _wake_threshold_within_large_frame() == 1


def test_end_within_frame_is_close_reason() -> None:
    left, right = sockets()
    tune(right, silence_s=5.0)
    owner = Owner()
    link = StreamLink(right, owner)
    left.sendall(FrameHeader(FrameKind.DATA, 1000, 1).encode() + bytes(500))
    left.close()
    while link.closed is None:
        link.receive()
    assert link.closed == "the other side closed the connection"
    assert owner.frames == []
