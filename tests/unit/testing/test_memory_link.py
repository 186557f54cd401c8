"""Delays of links in memory. What holds for every link is in ``tests/contract``."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from barnraise.testing.memory_link import MemoryLink, memory_pair
from barnraise.transport.links.frames import FrameHeader, FrameKind
from barnraise.transport.links.link import Link


@dataclass
class Owner:
    """Handler that keeps the serial numbers of pings."""

    serials: list[int] = field(default_factory=list)

    def target(self, link: Link, header: FrameHeader) -> memoryview | None:
        return None

    def frame(self, link: Link, header: FrameHeader, payload: memoryview) -> None:
        self.serials.append(header.first)

    def sent(self, link: Link, token: object) -> None: ...


@dataclass
class Clock:
    now: float = 100.0


def _ping(link: MemoryLink, serial: int) -> None:
    link.send(FrameHeader(FrameKind.PING, first=serial))
    link.flush()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_bytes_arrive_after_the_delay_of_their_direction(clock: Clock) -> None:
    left_owner, right_owner = Owner(), Owner()
    left, right = memory_pair(left_owner, right_owner, delays=(2.0, 0.5), now=lambda: clock.now)
    _ping(left, 1)
    _ping(right, 2)
    assert (right.next_event_at, left.next_event_at) == (102.0, 100.5)
    assert not right.is_readable
    assert right.receive() is False
    clock.now = 100.5
    left.receive()
    right.receive()
    assert (left_owner.serials, right_owner.serials) == ([2], [])
    clock.now = 101.0
    _ping(left, 3)
    clock.now = 102.0
    assert right.receive() is False, "the second one is on its way"
    assert right_owner.serials == [1]
    assert right.next_event_at == 103.0
    clock.now = 103.0
    right.receive()
    assert right_owner.serials == [1, 3]
    assert right.next_event_at is None


def test_end_arrives_after_all_bytes(clock: Clock) -> None:
    owner = Owner()
    left, right = memory_pair(Owner(), owner, delays=(1.0, 0.0), now=lambda: clock.now)
    _ping(left, 1)
    clock.now = 100.5
    left.close("gone")
    clock.now = 101.0
    right.receive()
    assert owner.serials == [1]
    assert right.receive() is False
    assert right.closed is None, "the end is on its way"
    assert right.next_event_at == 101.5
    clock.now = 101.5
    right.receive()
    assert right.closed == "the other side closed the connection"
    assert right.next_event_at is None


def test_any_bytes_can_arrive_at_an_end(clock: Clock) -> None:
    owner = Owner()
    _, right = memory_pair(Owner(), owner, delays=(1.0, 0.0), now=lambda: clock.now)
    right.arrive(FrameHeader(FrameKind.PING, first=7).encode())
    assert right.is_readable, "without the delay"
    right.receive()
    assert owner.serials == [7]
    right.arrive(bytes([255]) * 100)
    right.receive()
    assert right.closed is not None
    assert "it broke the protocol" in right.closed
