"""Frame headers: golden vectors, rejected headers, and any cuts of the stream."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import ProtocolError
from barnraise.testing.memory_link import MemoryLink
from barnraise.transport.links.frames import (
    BULK,
    HEADER_BYTES,
    MAX_CONTROL,
    MAX_PAYLOAD,
    FrameHeader,
    FrameKind,
    parse_header,
)
from barnraise.transport.links.link import FrameWriter, Link
from tests.repository import ROOT

VECTORS = json.loads((ROOT / "tests" / "vectors" / "frames.json").read_text("utf-8"))

headers = st.builds(
    FrameHeader,
    st.sampled_from(FrameKind),
    st.integers(0, MAX_CONTROL),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)


@pytest.mark.parametrize("vector", VECTORS["headers"], ids=lambda vector: vector["name"])
def test_headers_match_golden_vectors(vector: dict[str, object]) -> None:
    fields = dict(vector["fields"])  # type: ignore[call-overload]
    header = FrameHeader(**fields | {"kind": FrameKind[fields["kind"]]})
    wire = bytes.fromhex(str(vector["bytes"]))
    assert header.encode() == wire
    assert parse_header(wire) == header
    assert parse_header(b"xyz" + wire, 3) == header


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=lambda vector: vector["name"])
def test_wrong_headers_are_rejected(vector: dict[str, str]) -> None:
    with pytest.raises(ProtocolError):
        parse_header(bytes.fromhex(vector["bytes"]))


def test_golden_vectors_name_every_kind() -> None:
    """A new kind needs a vector; a number is never used again."""
    named = {vector["name"] for vector in VECTORS["headers"]}
    assert {kind.name for kind in FrameKind} <= named
    assert len({int(kind) for kind in FrameKind}) == len(FrameKind.__members__)


@given(headers)
def test_header_encodes_and_decodes(header: FrameHeader) -> None:
    assert parse_header(header.encode()) == header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_give_header_within_bounds_or_protocol_error(data: bytes) -> None:
    try:
        header = parse_header(data)
    except ProtocolError:
        return
    assert header.length <= (MAX_PAYLOAD if header.kind in BULK else MAX_CONTROL)
    assert header.encode() == data


@dataclass
class Collector:
    """Handler that records every frame and discards some payloads."""

    frames: list[tuple[FrameHeader, bytes]] = field(default_factory=list)

    def target(self, link: Link, header: FrameHeader) -> memoryview | None:
        return None if header.first % 5 == 4 else memoryview(bytearray(header.length))

    def frame(self, link: Link, header: FrameHeader, payload: memoryview) -> None:
        assert len(payload) == header.length
        self.frames.append((header, bytes(payload)))

    def sent(self, link: Link, token: object) -> None: ...


def feed(link: MemoryLink, data: bytes, cuts: list[int]) -> None:
    """Feed the reader in pieces of these sizes, repeated."""
    at = turn = 0
    while at < len(data):
        space = link.reader.space()
        assert len(space) > 0
        count = min(len(space), len(data) - at, cuts[turn % len(cuts)])
        space[:count] = data[at : at + count]
        link.reader.advance(count)
        at, turn = at + count, turn + 1


frames = st.lists(
    st.tuples(
        st.sampled_from(FrameKind),
        st.integers(0, 100),
        st.sampled_from([0, 1, 31, 32, 33, 1000, 16 << 10, MAX_CONTROL, 70_000, 200_000]),
    ),
    max_size=12,
)
chunkings = st.lists(st.integers(1, 100_000), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(frames, st.one_of(chunkings, st.lists(st.integers(30, 40), min_size=1, max_size=3)))
def test_frames_are_same_for_any_cuts(sent: list[tuple[FrameKind, int, int]], cuts: list[int]) -> None:
    wire, expected = b"", []
    for number, (kind, first, length) in enumerate(sent):
        if kind not in BULK:
            length = min(length, MAX_CONTROL)
        payload = bytes([number + 1]) * length
        header = FrameHeader(kind, length, number, number, first)
        wire += header.encode() + payload
        if kind not in BULK or first % 5 != 4 or not length:
            expected.append((header, payload))
    collector = Collector()
    feed(MemoryLink(collector, 0), wire, cuts)
    assert collector.frames == expected


@settings(deadline=None)
@given(st.binary(max_size=2000), chunkings, st.lists(headers, max_size=4))
def test_reader_of_any_bytes_gives_frames_or_protocol_error(
    tail: bytes, cuts: list[int], opening: list[FrameHeader]
) -> None:
    wire = b"".join(header.encode() + bytes(header.length) for header in opening) + tail
    try:
        feed(MemoryLink(Collector(), 0), wire, cuts)
    except ProtocolError:
        pass


def test_reader_allocates_no_more_than_largest_frame() -> None:
    collector = Collector()
    link = MemoryLink(collector, 0)
    tracemalloc.start()
    for number in range(2000):
        first = 4 if number % 2 else 0  # thrown away, or taken
        head = FrameHeader(FrameKind.DATA, MAX_PAYLOAD, 1, 0, first).encode()
        feed(
            link, head + bytes(MAX_PAYLOAD) if number < 4 else FrameHeader(FrameKind.PING).encode(), [300_000]
        )
        collector.frames.clear()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * MAX_PAYLOAD


def test_small_frames_are_sent_together() -> None:
    link = MemoryLink(Collector(), 0)
    writer = FrameWriter(link, Collector())
    for number in range(10):
        writer.control(FrameHeader(FrameKind.PING, first=number))
        writer.bulk(FrameHeader(FrameKind.DATA, group=1, first=number), memoryview(bytes(100)), number)
    chunks = writer.chunks()
    assert len(chunks) == 1
    assert len(chunks[0]) == 10 * HEADER_BYTES + 10 * (HEADER_BYTES + 100)
    kinds = [parse_header(chunks[0], HEADER_BYTES * number).kind for number in range(11)]
    assert kinds == [FrameKind.PING] * 10 + [FrameKind.DATA]
    assert writer.control_bytes == 0
    writer.advance(len(chunks[0]))
    assert not writer.pending
