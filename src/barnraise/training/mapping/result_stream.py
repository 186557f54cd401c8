"""Streams of results between the workers of a group, in pieces; a result may span several of them."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from barnraise.core.errors import ProtocolError
from barnraise.training.mapping.encoded_values import MAX_RESULT_BYTES

MAX_PIECE = 4 << 20
_FRAME = struct.Struct("<QQ")  # item and length


class OutgoingStream:
    """Results that this worker has still to send; ``content`` returns the bytes of an item's result."""

    def __init__(self, content: Callable[[int], bytes]) -> None:
        self._content = content
        self._items: deque[int] = deque()
        self._rest = memoryview(b"")  # of a result of which a part was sent

    @property
    def is_empty(self) -> bool:
        return not self._items and not self._rest

    def add(self, items: Iterable[int]) -> None:
        """Queue the results of these items."""
        self._items.extend(items)

    def take(self, limit: int = MAX_PIECE) -> bytes:
        """Return the next piece of the stream, at most ``limit`` bytes."""
        parts: list[bytes | memoryview] = []
        space = limit
        while space and not self.is_empty:
            if not self._rest:
                item = self._items.popleft()
                content = self._content(item)
                self._rest = memoryview(_FRAME.pack(item, len(content)) + content)
            part, self._rest = self._rest[:space], self._rest[space:]
            parts.append(part)
            space -= len(part)
        return b"".join(parts)


class IncomingStream:
    """Parser of the stream of one worker."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the complete results with their items. Raise ProtocolError if one is too large."""
        self._buffer += piece
        while len(self._buffer) >= _FRAME.size:
            item, length = _FRAME.unpack_from(self._buffer)
            if length > MAX_RESULT_BYTES:
                raise ProtocolError(f"a worker announces a result of {length} bytes")
            end = _FRAME.size + length
            if len(self._buffer) < end:
                return
            content = bytes(self._buffer[_FRAME.size : end])
            del self._buffer[:end]
            yield item, content
