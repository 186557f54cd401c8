"""Decoder of bytes that another process wrote: typed, and with one error class for every fault."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from barnraise.core.errors import ProtocolError
from barnraise.core.sanitize import printable

T = TypeVar("T")


def decode(
    decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T],
    data: bytes | memoryview,
    problem: str,
    *,
    hint: str | None = None,
) -> T:
    """Decode the bytes, or raise ProtocolError with this sentence if they are not of the decoder's type."""
    try:
        return decoder.decode(data)
    # Broken text is a ValueError, and a deep nest of nothing a RecursionError.
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{problem}: {printable(str(error))}", hint=hint) from error
