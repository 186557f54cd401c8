"""Timeouts of messages: a receive without a message may end alone, and nothing else."""

from __future__ import annotations

import pytest

from barnraise.collectives.comm_process.point_to_point import PointToPoint
from barnraise.collectives.messages import ReceiveFrom, SendTo
from barnraise.transport.links.frames import EAGER_BYTES, FrameHeader, FrameKind

_LARGE = EAGER_BYTES + 1


@pytest.fixture
def finished() -> list[int]:
    return []


@pytest.fixture
def messages(finished: list[int]) -> PointToPoint:
    def finish(operation: int, _: int) -> None:
        finished.append(operation)

    return PointToPoint(7, lambda *_: None, lambda *_: None, finish, pytest.fail)


def _receive(messages: PointToPoint, operation: int, *, alone: bool, peer: int = 1, size: int = 4) -> None:
    command = ReceiveFrom(operation, 7, peer, 3, 0, 1, 0, size, 5.0, alone)
    messages.receive(command, memoryview(bytearray(size)), 5.0)


def _offer(messages: PointToPoint, size: int) -> None:
    header = FrameHeader(FrameKind.OFFER, group=7, sequence=0, first=3, second=0, length=8)
    messages.frame(1, header, memoryview(size.to_bytes(8, "little")))


@pytest.mark.parametrize(("peer", "late", "name"), [(1, (1,), "rank 1"), (-1, (), "any rank")])
def test_receive_without_message_fails_alone(
    messages: PointToPoint, peer: int, late: tuple[int, ...], name: str
) -> None:
    _receive(messages, 10, alone=True, peer=peer)
    _receive(messages, 11, alone=False)
    assert messages.take_expired(4.9) == []
    assert messages.find_timeout(4.9) is None
    ((operation, failure),) = messages.take_expired(5.0)
    assert (operation, failure.code, failure.late) == (10, "operation-timeout", late)
    assert name in failure.message
    assert messages.pending() == [11]
    failure_of_group = messages.find_timeout(5.0)
    assert failure_of_group is not None
    assert "found no partner" in failure_of_group.message


def test_cancelled_receive_fails_alone_and_later_message_reaches_the_next(
    messages: PointToPoint, finished: list[int]
) -> None:
    _receive(messages, 10, alone=False)
    messages.expire(99, 1.0)
    assert messages.take_expired(1.0) == []
    messages.expire(10, 1.0)
    assert [operation for operation, _ in messages.take_expired(1.0)] == [10]
    eager = FrameHeader(FrameKind.EAGER, group=7, sequence=0, first=3, second=0, length=4)
    messages.frame(1, eager, memoryview(b"abcd"))
    _receive(messages, 12, alone=True)
    assert finished == [12]
    assert messages.pending() == []


def test_receive_of_a_message_on_its_way_ends_the_group(messages: PointToPoint) -> None:
    _receive(messages, 10, alone=True, size=_LARGE)
    _offer(messages, _LARGE)
    messages.expire(10, 1.0)
    assert messages.take_expired(1.0) == []
    failure = messages.find_timeout(1.0)
    assert failure is not None
    assert "bytes are on the way" in failure.message


def test_cancelled_send_without_receive_ends_the_group(messages: PointToPoint) -> None:
    messages.send(SendTo(20, 7, 1, 3, 0, 1, 0, _LARGE, 60.0), memoryview(bytearray(_LARGE)), 60.0)
    messages.expire(20, 1.0)
    assert messages.take_expired(1.0) == []
    failure = messages.find_timeout(1.0)
    assert failure is not None
    assert (failure.late, "found no partner" in failure.message) == ((1,), True)
