"""Traffic: sums over links never become smaller, and Linux's struct is read at the right place."""

from __future__ import annotations

import socket
import struct
import sys

import pytest

from barnraise.collectives.comm_process.traffic import TrafficTotals, retransmits
from barnraise.transport.links.frames import FrameHeader, FrameKind
from barnraise.transport.links.link import Link
from barnraise.transport.links.stream import StreamLink


class Ignored:
    """Handler of links that no frame interests."""

    def target(self, link: Link, header: FrameHeader) -> memoryview | None:
        return None

    def frame(self, link: Link, header: FrameHeader, payload: memoryview) -> None: ...

    def sent(self, link: Link, token: object) -> None: ...


def pair() -> tuple[StreamLink, StreamLink]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    for end in (first, second):
        end.setblocking(False)
    return StreamLink(first, Ignored()), StreamLink(second, Ignored())


def exchange(sender: StreamLink, receiver: StreamLink, count: int) -> None:
    before = receiver.bytes_in
    sender.send(FrameHeader(FrameKind.GOODBYE), b"x" * count)
    while sender.flush():
        pass
    while receiver.bytes_in - before < count:
        receiver.receive()


def test_sums_keep_what_closed_links_have_sent() -> None:
    totals, (sender, receiver) = TrafficTotals(), pair()
    exchange(sender, receiver, 1000)
    sent, received, _ = totals.sample([sender])
    assert sent == sender.bytes_out > 1000
    assert received == 0
    assert totals.sample([receiver])[1] == sent
    sender.close("test")
    totals.close(sender)
    assert totals.sample([])[0] == sent
    other, end = pair()
    exchange(other, end, 10)
    assert totals.sample([other])[0] == sent + other.bytes_out
    for link in (receiver, other, end):
        link.close("test")


def test_retransmits_are_the_24th_number_of_the_struct() -> None:
    numbers = list(range(1, 40))
    assert retransmits(bytes(8) + struct.pack("=39I", *numbers)) == 24
    assert retransmits(b"short") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="struct tcp_info of Linux")
def test_link_on_loopback_retransmits_nothing() -> None:
    sender, receiver = pair()
    exchange(sender, receiver, 5000)
    assert retransmits(sender.tcp_info()) == 0
    sender.close("test")
    receiver.close("test")
