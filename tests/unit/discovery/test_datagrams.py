"""Datagrams of the broadcast finder."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.discovery import namespace_tag
from barnraise.discovery.datagrams import DATAGRAM_BYTES, Datagram, decode_datagram, encode_datagram

TAG = namespace_tag(b"s" * 32)


TAGS = st.binary(min_size=16, max_size=16).map(bytes.hex)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["question", "answer"]), TAGS, st.integers(1, 65535))
def test_datagram_encodes_and_decodes(kind: str, tag: str, port: int) -> None:
    datagram = Datagram(kind, tag, port)  # type: ignore[arg-type]
    data = encode_datagram(datagram)
    assert len(data) == DATAGRAM_BYTES
    assert decode_datagram(data) == datagram


def test_datagram_bytes_on_wire_are_fixed() -> None:
    data = encode_datagram(Datagram("question", "000102030405060708090a0b0c0d0e0f", 52416))
    assert data.hex() == "626b79640101000102030405060708090a0b0c0d0e0fccc0"


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64) | st.binary(max_size=20).map(lambda tail: b"bkyd\x01" + tail))
def test_decode_datagram_of_any_bytes_gives_datagram_or_none(data: bytes) -> None:
    datagram = decode_datagram(data)
    if datagram is not None:
        assert encode_datagram(datagram) == data
        assert datagram.port or datagram.kind == "question"


@pytest.mark.parametrize("place", [0, 4, 5])
def test_decode_datagram_with_wrong_header_gives_none(place: int) -> None:
    data = bytearray(encode_datagram(Datagram("answer", TAG, 1)))
    data[place] ^= 0x40
    assert decode_datagram(bytes(data)) is None
    assert decode_datagram(bytes(data) + b"x") is None
