"""Control frames: golden vectors, and any bytes within bounded memory."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import ProtocolError
from barnraise.transport.control.framing import (
    HEADER_BYTES,
    ControlFrame,
    ControlFrameKind,
    ControlFrames,
    encode_control,
    encode_opening,
)
from barnraise.transport.listener.preface import Preface
from tests.repository import ROOT

VECTORS = json.loads((ROOT / "tests" / "vectors" / "control.json").read_text())
LARGEST = 64
messages = st.binary(max_size=LARGEST)
frames = st.one_of(
    st.builds(ControlFrame, st.just(ControlFrameKind.MESSAGE), messages),
    st.builds(
        ControlFrame,
        st.sampled_from([ControlFrameKind.PING, ControlFrameKind.PONG]),
        st.binary(min_size=8, max_size=8),
    ),
    st.builds(ControlFrame, st.just(ControlFrameKind.OPEN), st.binary(min_size=7, max_size=7)),
)


@pytest.mark.parametrize("vector", VECTORS["frames"], ids=lambda vector: vector["name"])
def test_frames_match_golden_vectors(vector: dict[str, str]) -> None:
    kind, payload = ControlFrameKind[vector["kind"]], bytes.fromhex(vector["payload"])
    assert encode_control(kind, payload).hex() == vector["bytes"]
    parser = ControlFrames(1 << 20)
    parser.feed(bytes.fromhex(vector["bytes"]))
    assert parser.next() == (kind, payload)


@pytest.mark.parametrize("vector", VECTORS["openings"], ids=lambda vector: vector["name"])
def test_openings_match_golden_vectors(vector: dict[str, int | str]) -> None:
    low, high = int(vector["version_min"]), int(vector["version_max"])
    preface = Preface(bytes(16), bytes(16), int(vector["route"]), version_min=low, version_max=high)
    assert encode_opening(preface, int(vector["version"])).hex() == vector["bytes"]


@given(st.lists(frames, max_size=8), st.integers(1, 40))
def test_frames_decode_for_any_cuts(sent: list[ControlFrame], step: int) -> None:
    wire = b"".join(encode_control(*frame) for frame in sent)
    parser, decoded = ControlFrames(LARGEST), []
    for start in range(0, len(wire), step):
        parser.feed(wire[start : start + step])
        while (frame := parser.next()) is not None:
            decoded.append(frame)
        assert len(parser._buffer) < HEADER_BYTES + LARGEST
    assert decoded == sent


@given(st.binary(max_size=300), st.integers(0, 3), st.integers(0, 2 * LARGEST))
def test_any_bytes_give_frames_or_protocol_error(data: bytes, kind: int, length: int) -> None:
    for words in (data, struct.pack("<IB", length, kind) + data):
        parser = ControlFrames(LARGEST)
        parser.feed(words)
        try:
            while (frame := parser.next()) is not None:
                assert len(frame.payload) <= LARGEST
        except ProtocolError:
            pass


@pytest.mark.parametrize(
    "header",
    [(LARGEST + 1, 0), (0xFFFFFFFF, 0), (0, 4), (0, 255), (9, 1), (0, 1), (7, 2), (8, 3), (0, 3)],
)
def test_wrong_header_raises_before_payload(header: tuple[int, int]) -> None:
    parser = ControlFrames(LARGEST)
    parser.feed(struct.pack("<IB", *header))
    with pytest.raises(ProtocolError):
        parser.next()
