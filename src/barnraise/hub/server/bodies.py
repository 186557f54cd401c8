"""Bodies of requests: small ones in memory, large pieces of uploads in files as they arrive.

So members that send at once need memory for their connections, and not for what they send.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request

from barnraise.core.errors import HubRefused
from barnraise.hub.storage.blobs import FREE_SPACE_HINT

_WRITTEN_AT_ONCE = 128 << 10
_READ_AT_ONCE = 256 << 10


class ArrivedBody(NamedTuple):
    """A body that has arrived, in memory (``data``) or in a file (``path``), with its SHA-256."""

    size: int
    digest: bytes
    data: bytes = b""
    path: Path | None = None

    @classmethod
    def in_memory(cls, data: bytes) -> ArrivedBody:
        """Return a body that is in memory."""
        return cls(len(data), hashlib.sha256(data).digest(), data)

    def parts(self, skip: int) -> Iterator[bytes]:
        """Yield the content after the first ``skip`` bytes. Blocks if it is in a file."""
        if self.path is None:
            yield self.data[skip:]
            return
        with self.path.open("rb") as file:
            file.seek(skip)
            while part := file.read(_READ_AT_ONCE):
                yield part


async def read_body(request: Request, max_bytes: int) -> ArrivedBody:
    """Read a body into memory. Raise HubRefused (413) if it exceeds the limit."""
    pieces = [piece async for piece in _bounded(request, max_bytes)]
    return ArrivedBody.in_memory(b"".join(pieces))


class BodyFiles:
    """Folder of the bodies that are arriving or are handled now."""

    def __init__(self, directory: Path) -> None:
        """Make the folder, and remove what a killed process has left there."""
        self._directory = directory / "arriving"
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for left in self._directory.iterdir():
            left.unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def receive(self, request: Request, max_bytes: int) -> AsyncIterator[ArrivedBody]:
        """Write a body to a file, which is removed with the context.

        Raise HubRefused (413) if it exceeds the limit, (503) if the disk fails.
        """
        path = self._directory / secrets.token_hex(8)
        try:
            yield await _write(request, max_bytes, path)
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


async def _write(request: Request, max_bytes: int, path: Path) -> ArrivedBody:
    digest, size, waiting = hashlib.sha256(), 0, bytearray()
    try:
        with await asyncio.to_thread(path.open, "xb") as file:
            async for piece in _bounded(request, max_bytes):
                size += len(piece)
                digest.update(piece)
                waiting += piece
                if len(waiting) >= _WRITTEN_AT_ONCE:
                    await asyncio.to_thread(file.write, waiting)
                    waiting = bytearray()
            await asyncio.to_thread(file.write, waiting)
    except OSError as error:
        message = f"the hub's disk failed: {error.strerror or error}"
        raise HubRefused(503, "disk", message, hint=FREE_SPACE_HINT, retry_s=5.0) from error
    return ArrivedBody(size, digest.digest(), path=path)


async def _bounded(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > max_bytes:
            raise too_long(max_bytes)
        yield piece


def too_long(max_bytes: int) -> HubRefused:
    """Return the error about a body beyond the limit."""
    return HubRefused(
        413, "length", f"the body may have at most {max_bytes} bytes", hint="Send less at once."
    )
