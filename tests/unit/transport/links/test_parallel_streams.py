"""Parallel streams: bulk frames into the owner's memory, forgotten on demand."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator

import pytest

from barnraise.transport.links.frames import FrameHeader, FrameKind
from barnraise.transport.links.parallel_streams import (
    ParallelStream,
    ParallelStreamReport,
    ParallelStreamReports,
)

SIZE = 300_000


@pytest.fixture
def ends() -> Iterator[tuple[ParallelStream, ParallelStreamReports, ParallelStream, ParallelStreamReports]]:
    left, right = socket.socketpair()
    left_reports, right_reports = ParallelStreamReports(), ParallelStreamReports()
    lanes = ParallelStream(left, left_reports), ParallelStream(right, right_reports)
    yield lanes[0], left_reports, lanes[1], right_reports
    for lane in lanes:
        lane.close()
    left_reports.close()
    right_reports.close()


_kept: dict[ParallelStreamReports, list[ParallelStreamReport]] = {}


def until(reports: ParallelStreamReports, kind: str) -> ParallelStreamReport:
    """Return the next report of this kind; the others stay for later."""
    kept = _kept.setdefault(reports, [])
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        for report in kept:
            if report.kind == kind:
                kept.remove(report)
                return report
        with selectors.DefaultSelector() as selector:
            selector.register(reports, selectors.EVENT_READ)
            selector.select(0.2)
        kept += reports.take()
    raise AssertionError(f"no {kind} among {[report.kind for report in kept]}")


def payload(seed: int) -> memoryview:
    return memoryview(bytes((seed + i) % 251 for i in range(SIZE)))


def test_frames_arrive_in_memory_of_owner(
    ends: tuple[ParallelStream, ParallelStreamReports, ParallelStream, ParallelStreamReports],
) -> None:
    sender, sender_reports, receiver, receiver_reports = ends
    memory = [memoryview(bytearray(SIZE)) for _ in range(3)]
    for number in range(3):
        sender.send(FrameHeader(FrameKind.DATA, group=7, sequence=1, first=number), payload(number), number)
    for number in range(3):
        header = until(receiver_reports, "arriving").header
        assert header is not None
        assert (header.first, header.length) == (number, SIZE)
        receiver.place(memory[number])
        until(receiver_reports, "arrived")
        assert memory[number] == payload(number)
        assert until(sender_reports, "sent").token == number
    assert receiver.bytes_in == sender.bytes_out == 3 * (SIZE + 32)


def test_forgotten_group_leaves_memory_unchanged(
    ends: tuple[ParallelStream, ParallelStreamReports, ParallelStream, ParallelStreamReports],
) -> None:
    sender, _, receiver, receiver_reports = ends
    memory = memoryview(bytearray(SIZE))
    sender.send(FrameHeader(FrameKind.DATA, group=7), payload(1), None)
    until(receiver_reports, "arriving")
    receiver.place(memory)
    receiver.forget(7)
    before = bytes(memory)
    until(receiver_reports, "arrived")
    assert bytes(memory) == before
    # and the lane still works
    sender.send(FrameHeader(FrameKind.DATA, group=8), payload(2), None)
    until(receiver_reports, "arriving")
    receiver.place(memory)
    until(receiver_reports, "arrived")
    assert memory == payload(2)


def test_queued_frames_of_forgotten_group_are_not_sent(
    ends: tuple[ParallelStream, ParallelStreamReports, ParallelStream, ParallelStreamReports],
) -> None:
    sender, sender_reports, receiver, receiver_reports = ends
    sender.send(FrameHeader(FrameKind.DATA, group=7, first=0), payload(1), "first")
    until(receiver_reports, "arriving")  # the receiver stops reading, so the rest waits
    sender.send(FrameHeader(FrameKind.DATA, group=9, first=1), payload(2), "dropped")
    sender.send(FrameHeader(FrameKind.DATA, group=8, first=2), payload(3), "kept")
    sender.forget(9)
    receiver.place(None)
    until(receiver_reports, "arrived")
    header = until(receiver_reports, "arriving").header
    assert header is not None
    assert header.first == 2
    receiver.place(None)
    assert [until(sender_reports, "sent").token for _ in range(2)] == ["first", "kept"]
    assert sender.queued_bytes == 0


def test_control_frame_on_parallel_stream_closes_it(
    ends: tuple[ParallelStream, ParallelStreamReports, ParallelStream, ParallelStreamReports],
) -> None:
    sender, _, _, receiver_reports = ends
    sender.send(FrameHeader(FrameKind.PING), memoryview(b""), None)
    assert "PING" in until(receiver_reports, "closed").why


def test_lost_peer_of_parallel_stream_is_reported(
    ends: tuple[ParallelStream, ParallelStreamReports, ParallelStream, ParallelStreamReports],
) -> None:
    sender, _, _, receiver_reports = ends
    sender.close()
    assert "closed a lane" in until(receiver_reports, "closed").why
