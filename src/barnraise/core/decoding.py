"""Reads what another process wrote: typed, and with one kind of error whatever is wrong with the bytes."""

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
    """ProtocolError with this sentence for anything that is not of the decoder's type."""
    try:
        return decoder.decode(data)
    # Broken text is a ValueError, and a deep nest of nothing a RecursionError.
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{problem}: {printable(str(error))}", hint=hint) from error
