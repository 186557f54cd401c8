"""Contract of every link: in memory, plaintext and TLS pass one suite."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import pytest

from barnraise.transport.links.frames import HEADER_BYTES, MAX_PAYLOAD, FrameHeader, FrameKind
from tests.contract.link_pairs import KINDS, Pair

MEBI = 1 << 20


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = KINDS[request.param]()
    yield made
    made.close()


def bulk(pair: Pair, number: int, payload: bytes | bytearray, group: int = 1) -> None:
    header = FrameHeader(FrameKind.DATA, group=group, sequence=7, first=number)
    pair.left.send_bulk(header, memoryview(payload), number)


def arrived(pair: Pair) -> list[int]:
    return [header.first for header, _ in pair.receiver.frames]


def fill(pair: Pair) -> None:
    """Write until the link takes no more, while the other end does not read."""
    before = -1
    while pair.left.flush() and pair.left.bytes_out != before:
        before = pair.left.bytes_out


def test_everything_arrives_once_in_order_both_ways(pair: Pair) -> None:
    random_bytes = random.Random(1)
    sizes = [1, 100, 16 << 10, (16 << 10) + 1, 40_000, 5, 0, 70_000, 3]
    payloads = [random_bytes.randbytes(size) for size in sizes]
    for number, payload in enumerate(payloads):
        bulk(pair, number, payload)
        back = FrameHeader(FrameKind.PARCEL, group=2, first=number)
        pair.right.send_bulk(back, memoryview(payload), None)
    pair.pump(lambda: len(pair.receiver.frames) == len(pair.sender.frames) == len(sizes))
    for number, payload in enumerate(payloads):
        header, got = pair.receiver.frames[number]
        assert header == FrameHeader(FrameKind.DATA, len(payload), 1, 7, number, 0)
        assert got == payload == pair.sender.frames[number][1]


def test_control_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    for number in range(300):
        pair.left.send(FrameHeader(FrameKind.OPEN, group=number + 1, second=number), b"x" * number)
    pair.pump(lambda: len(pair.receiver.frames) == 300)
    for number, (header, payload) in enumerate(pair.receiver.frames):
        assert (header.group, header.second, payload) == (number + 1, number, b"x" * number)


def test_control_frames_pass_between_bulk_frames(pair: Pair) -> None:
    for number in range(8):
        bulk(pair, number, bytes(MEBI))
    fill(pair)
    pair.left.send(FrameHeader(FrameKind.FAIL, group=1, first=99), b"now")
    pair.pump(lambda: len(pair.receiver.frames) == 9)
    order = arrived(pair)
    assert sorted(order) == [*range(8), 99]
    assert order.index(99) < 5, "it waited behind everything"
    order.remove(99)
    assert order == list(range(8))


def test_payload_is_received_straight_into_memory_of_owner(pair: Pair) -> None:
    tensor = bytearray(300_000)
    place = memoryview(tensor)[1000:201_000]
    pair.receiver.places[0] = place
    data = random.Random(2).randbytes(200_000)
    bulk(pair, 0, data)
    pair.pump(lambda: len(pair.receiver.frames) == 1)
    assert tensor[1000:201_000] == data
    assert not any(tensor[:1000])
    assert not any(tensor[201_000:])
    # the very same memory, not a copy of it
    assert pair.receiver.payloads[0].obj is tensor


def test_payload_is_read_from_memory_of_owner_when_sent(pair: Pair) -> None:
    first, second = bytearray(MEBI), bytearray(MEBI)
    bulk(pair, 0, first)
    bulk(pair, 1, second)
    second[:] = b"\x07" * MEBI  # queued, but not read yet
    pair.pump(lambda: len(pair.receiver.frames) == 2)
    assert pair.receiver.frames[1][1] == bytes(second)


def test_largest_frame_arrives(pair: Pair) -> None:
    data = random.Random(3).randbytes(MAX_PAYLOAD)
    bulk(pair, 0, data)
    pair.pump(lambda: len(pair.receiver.frames) == 1)
    assert pair.receiver.frames[0][1] == data


def test_empty_payload_is_a_frame(pair: Pair) -> None:
    bulk(pair, 0, b"")
    bulk(pair, 1, b"x")
    pair.pump(lambda: len(pair.receiver.frames) == 2)
    assert [payload for _, payload in pair.receiver.frames] == [b"", b"x"]
    assert pair.sender.tokens == [0, 1]


def test_payload_without_target_is_discarded(pair: Pair) -> None:
    for number in range(12):
        if number % 3:
            pair.receiver.places[number] = None
        bulk(pair, number, bytes([number]) * (number * 20_000))
    pair.left.send(FrameHeader(FrameKind.PING, first=50))
    pair.pump(lambda: len(pair.receiver.frames) == 5)
    assert sorted(arrived(pair)) == [0, 3, 6, 9, 50]
    for header, payload in pair.receiver.frames:
        assert header.kind is FrameKind.PING or payload == bytes([header.first]) * (header.first * 20_000)


def test_sent_token_is_reported_once_after_sending(pair: Pair) -> None:
    for number in range(10):
        bulk(pair, number, bytes(MEBI))
    fill(pair)
    done = len(pair.sender.tokens)
    assert done < 10
    assert pair.sender.tokens == list(range(done))
    assert done * (MEBI + HEADER_BYTES) <= pair.left.bytes_out < (done + 1) * (MEBI + HEADER_BYTES)
    pair.pump(lambda: len(pair.receiver.frames) == 10)
    assert pair.sender.tokens == list(range(10))
    assert pair.left.bytes_out == pair.right.bytes_in == 10 * (MEBI + HEADER_BYTES)


def test_slow_reader_holds_writer_back(pair: Pair) -> None:
    payload = bytearray(MEBI)
    for number in range(200):
        bulk(pair, number, payload)
    assert pair.left.writer.queued_bytes == 200 * MEBI
    fill(pair)
    assert pair.left.flush(), "something is left to write"
    # what left is in the network's buffers; nothing of the rest was copied
    assert pair.left.bytes_out < 20 * MEBI
    assert pair.left.writer.queued_bytes > 180 * MEBI
    assert sum(len(view) for view in pair.left.writer.chunks()) <= MEBI + HEADER_BYTES


def test_forgotten_frames_are_dropped_and_started_one_is_finished_from_copy(pair: Pair) -> None:
    memory = [bytearray([number + 1]) * MEBI for number in range(6)]
    other = bytearray(b"\x77" * MEBI)
    for number, payload in enumerate(memory):
        bulk(pair, number, payload, group=1)
    bulk(pair, 10, other, group=2)
    fill(pair)
    done = len(pair.sender.tokens)
    pair.left.forget(1)
    for given in memory:
        given[:] = b"\xdb" * MEBI  # the owner uses it for something else at once
    pair.pump(lambda: 10 in arrived(pair))
    order = arrived(pair)
    assert order[:-1] == list(range(len(order) - 1))
    assert done <= len(order) - 1 <= done + 1, "at most the frame that had begun came after"
    for header, got in pair.receiver.frames[:-1]:
        assert got == bytes([header.first + 1]) * MEBI
    assert pair.receiver.frames[-1][1] == other
    assert [token for token in pair.sender.tokens if token != 10] == list(range(done))
    assert pair.left.writer.queued_bytes == 0
    assert not pair.left.writer.pending


def test_forgetting_another_group_changes_nothing(pair: Pair) -> None:
    for number in range(3):
        bulk(pair, number, bytes([number]) * MEBI)
    fill(pair)
    pair.left.forget(2)
    pair.pump(lambda: len(pair.receiver.frames) == 3)
    assert pair.sender.tokens == [0, 1, 2]


def test_forgotten_memory_is_not_written(pair: Pair) -> None:
    tensor = bytearray(MEBI)
    pair.receiver.places[0] = memoryview(tensor)
    bulk(pair, 0, b"\x55" * MEBI)
    bulk(pair, 1, b"next")
    while not pair.right.reader.in_payload:  # until half of the frame is here
        pair.left.flush()
        pair.right.receive()
    pair.right.forget(1)
    tensor[:] = bytes(MEBI)
    pair.pump(lambda: 1 in arrived(pair))
    assert not any(tensor)
    assert pair.receiver.frames[-1][1] == b"next"


def test_close_keeps_its_reason(pair: Pair) -> None:
    pair.right.close("it was time")
    assert pair.right.closed == "it was time"
    pair.right.close("again")
    assert pair.right.closed == "it was time"
    assert pair.right.receive() is False
    pair.right.send(FrameHeader(FrameKind.PING))
    assert pair.right.flush() is False


def test_lost_peer_is_noticed_by_reading(pair: Pair) -> None:
    pair.left.send(FrameHeader(FrameKind.PING, first=1))
    pair.left.flush()
    pair.left.close("gone")
    pair.pump(lambda: pair.right.closed is not None)
    assert pair.right.closed is not None
    assert "closed" in pair.right.closed or "reset" in pair.right.closed
    assert arrived(pair) == [1], "what it said before is heard"


def test_lost_peer_is_noticed_by_writing(pair: Pair) -> None:
    pair.left.close("gone")
    for number in range(40):
        pair.right.send_bulk(
            FrameHeader(FrameKind.DATA, group=1, first=number), memoryview(bytes(MEBI)), number
        )

    def noticed() -> bool:
        pair.right.flush()
        pair.right.receive()
        return pair.right.closed is not None

    pair.pump(noticed)


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<BBHIQQII", 200, 0, 0, 0, 0, 0, 0, 0),
        struct.pack("<BBHIQQII", FrameKind.PING, 1, 0, 0, 0, 0, 0, 0),
        struct.pack("<BBHIQQII", FrameKind.PING, 0, 5, 0, 0, 0, 0, 0),
        struct.pack("<BBHIQQII", FrameKind.DATA, 0, 0, MAX_PAYLOAD + 1, 1, 0, 0, 0),
        struct.pack("<BBHIQQII", FrameKind.OPEN, 0, 0, 0xFFFFFFFF, 1, 0, 0, 0),
    ],
    ids=["unknown kind", "flags", "reserved", "bulk too long", "control too long"],
)
def test_peer_that_breaks_protocol_is_disconnected(pair: Pair, raw: bytes) -> None:
    pair.left.send(FrameHeader(FrameKind.PING, first=1))
    pair.left.writer._control.append(raw)
    pair.left.send(FrameHeader(FrameKind.PING, first=2))
    pair.pump(lambda: pair.right.closed is not None)
    assert pair.right.closed is not None
    assert pair.right.closed.startswith("it broke the protocol: ")
    assert arrived(pair) == [1], "nothing behind it is believed"
    pair.pump(lambda: pair.left.closed is not None)


def test_frame_that_owner_rejects_closes_link(pair: Pair) -> None:
    pair.receiver.refuse = lambda header: header.first == 3
    for number in range(6):
        bulk(pair, number, bytes(30_000))
    pair.pump(lambda: pair.right.closed is not None)
    assert pair.right.closed == "it broke the protocol: not this one"
    assert arrived(pair) == [0, 1, 2]


def test_payload_that_does_not_fit_target_closes_link(pair: Pair) -> None:
    pair.receiver.places[0] = memoryview(bytearray(10))
    bulk(pair, 0, bytes(11))
    pair.pump(lambda: pair.right.closed is not None)
    assert pair.right.closed is not None
    assert "does not fit" in pair.right.closed


def test_description_names_encryption(pair: Pair, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["pair"]
    word = {"memory": "memory", "plaintext": "PLAINTEXT", "tls": "TLS_AES"}[kind]
    assert word in pair.left.description
