"""Cases of the frame writer that the contract suite cannot see from outside."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.testing.memory_link import MemoryLink
from barnraise.transport.links.frames import HEADER_BYTES, FrameHeader, FrameKind, parse_header
from barnraise.transport.links.link import FrameWriter, Link


@dataclass
class Owner:
    tokens: list[object] = field(default_factory=list)

    def target(self, link: Link, header: FrameHeader) -> memoryview | None:
        return None

    def frame(self, link: Link, header: FrameHeader, payload: memoryview) -> None: ...

    def sent(self, link: Link, token: object) -> None:
        self.tokens.append(token)


def writer() -> tuple[FrameWriter, Owner]:
    owner = Owner()
    return FrameWriter(MemoryLink(owner, 0), owner), owner


def parsed(wire: bytes) -> list[tuple[FrameHeader, bytes]]:
    frames, at = [], 0
    while at < len(wire):
        header = parse_header(wire, at)
        at += HEADER_BYTES
        frames.append((header, wire[at : at + header.length]))
        at += header.length
    assert at == len(wire)
    return frames


def drained(out: FrameWriter, step: int = 1 << 30) -> bytes:
    wire = b""
    while chunks := out.chunks():
        piece = bytes(chunks[0])[:step]
        wire += piece
        out.advance(len(piece))
    return wire


# what is asked of a writer: (is it bulk, group, size), or None to forget group 1, or how many bytes leave
actions = st.lists(
    st.one_of(
        st.tuples(st.booleans(), st.integers(1, 2), st.sampled_from([0, 1, 500, 16_000, 17_000, 60_000])),
        st.none(),
        st.integers(1, 50_000),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=150)
@given(actions)
def test_writer_sends_whole_frames_in_order_for_any_calls(calls: list[object]) -> None:
    out, owner = writer()
    wire, number = b"", 0
    memory: dict[int, bytearray] = {}
    groups: dict[int, int] = {}
    forgotten: set[int] = set()
    for action in calls:
        if action is None:
            out.forget(1)
            for token, group in groups.items():
                if group == 1 and token not in owner.tokens:
                    forgotten.add(token)
                    memory[token][:] = b"\xdb" * len(memory[token])
        elif isinstance(action, int):
            chunks = out.chunks()
            if chunks:
                piece = bytes(chunks[0])[:action]
                wire += piece
                out.advance(len(piece))
        elif isinstance(action, tuple):
            bulk, group, size = action
            number += 1
            if bulk:
                memory[number], groups[number] = bytearray(bytes([number])) * size, group
                out.bulk(
                    FrameHeader(FrameKind.DATA, group=group, first=number), memoryview(memory[number]), number
                )
            else:
                out.control(
                    FrameHeader(FrameKind.OPEN, group=group, first=number), bytes([number]) * min(size, 500)
                )
    wire += drained(out)
    frames = parsed(wire)
    numbers = [header.first for header, _ in frames]
    assert len(set(numbers)) == len(numbers)
    for kind in (FrameKind.DATA, FrameKind.OPEN):
        of_kind = [header.first for header, _ in frames if header.kind is kind]
        assert of_kind == sorted(of_kind)
    for header, payload in frames:
        assert payload == bytes([header.first]) * header.length, "poison or another's bytes left"
    assert len(owner.tokens) == len(set(owner.tokens))
    assert set(groups) - forgotten <= set(owner.tokens) <= set(numbers)
    assert (out.queued_bytes, out.control_bytes, out.pending) == (0, 0, False)


def test_joined_frames_are_private_at_once() -> None:
    """Small payloads are copied when they are joined, so that later changes do not matter."""
    out, owner = writer()
    memory = bytearray(b"\x01" * 100)
    out.bulk(FrameHeader(FrameKind.DATA, group=1), memoryview(memory), "token")
    first = bytes(out.chunks()[0])
    out.advance(10)
    out.forget(1)
    memory[:] = b"\xdb" * 100
    assert first[:10] + drained(out) == FrameHeader(FrameKind.DATA, 100, 1).encode() + b"\x01" * 100
    assert owner.tokens == ["token"]


def test_frame_written_byte_by_byte_is_complete() -> None:
    out, owner = writer()
    out.bulk(FrameHeader(FrameKind.DATA, group=1), memoryview(b"\x05" * 20_000), 1)
    out.control(FrameHeader(FrameKind.PING, first=9))
    frames = parsed(drained(out, step=1))
    assert [header.kind for header, _ in frames] == [FrameKind.PING, FrameKind.DATA]
    assert owner.tokens == [1]
