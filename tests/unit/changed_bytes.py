"""Bytes that are nearly a valid message: they get further into a decoder than random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


@st.composite
def changed(draw: st.DrawFn, valid: Sequence[bytes]) -> bytes:
    """Draw a valid message, and change it in one to four places."""
    data = bytearray(draw(st.sampled_from(list(valid))))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        size = draw(st.integers(0, 8))
        match draw(st.sampled_from(["set", "set", "set", "put", "cut", "repeat", "end"])):
            case "set":
                data[place : place + 1] = bytes([draw(st.integers(0, 255))])
            case "put":
                data[place:place] = draw(st.binary(min_size=1, max_size=8))
            case "cut":
                del data[place : place + size]
            case "repeat":
                data[place:place] = data[place : place + size]
            case "end":
                del data[place:]
    return bytes(data)


def read_or_refused(
    data: bytes,
    decode: Callable[[bytes], T],
    encode: Callable[[T], bytes],
    refusal: type[Exception] | tuple[type[Exception], ...],
) -> bool:
    """See that bytes are refused with our error, or read as something that survives the wire."""
    try:
        message = decode(data)
    except refusal:
        return False
    written = encode(message)
    assert encode(decode(written)) == written
    return True
