"""Streams of results: the results arrive whole, in pieces of any size."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import ProtocolError
from barnraise.training.mapping.result_stream import IncomingStream, OutgoingStream


@given(results=st.dictionaries(st.integers(0, 1000), st.binary(max_size=200)), size=st.integers(1, 300))
def test_results_arrive_whole_in_pieces_of_any_size(results: dict[int, bytes], size: int) -> None:
    outgoing, incoming = OutgoingStream(results.__getitem__), IncomingStream()
    outgoing.add(results)
    received: list[tuple[int, bytes]] = []
    while not outgoing.is_empty:
        piece = outgoing.take(size)
        assert 0 < len(piece) <= size
        received += incoming.feed(piece)
    assert received == list(results.items())


def test_result_of_an_impossible_size_is_refused() -> None:
    with pytest.raises(ProtocolError, match="announces a result of"):
        list(IncomingStream().feed(struct.pack("<QQ", 1, 1 << 40)))
