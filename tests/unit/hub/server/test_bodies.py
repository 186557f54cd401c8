"""Bodies of requests: what is in memory, what is in a file, and what remains of it."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from barnraise.core.errors import HubRefused
from barnraise.hub.server.bodies import ArrivedBody, BodyFiles, read_body

CONTENT = os.urandom(700_001)


def request_with(*pieces: bytes, is_cut: bool = False) -> Request:
    """Return a request whose body comes in these pieces; ``is_cut``: the client leaves before its end."""
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": piece, "more_body": True} for piece in pieces
    ]
    messages.append({"type": "http.disconnect"} if is_cut else {"type": "http.request", "body": b""})

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return messages.pop(0)

    return Request({"type": "http", "method": "PATCH", "headers": []}, receive)


def parts_of(content: bytes, size: int) -> list[bytes]:
    return [content[first : first + size] for first in range(0, len(content), size)]


@pytest.mark.parametrize("piece", [1_000, 16_384, 700_001])
@pytest.mark.parametrize("skip", [0, 3, 400_000, 700_001, 800_000])
def test_body_in_a_file_is_the_one_that_was_sent(tmp_path: Path, piece: int, skip: int) -> None:
    files = BodyFiles(tmp_path)

    async def main() -> None:
        request = request_with(*parts_of(CONTENT, piece))
        async with files.receive(request, len(CONTENT)) as body:
            assert body.path is not None
            assert not body.data
            assert (body.size, body.digest) == (len(CONTENT), hashlib.sha256(CONTENT).digest())
            assert b"".join(body.parts(skip)) == CONTENT[skip:]
        assert list((tmp_path / "arriving").iterdir()) == []

    asyncio.run(main())


@pytest.mark.parametrize("is_cut", [True, False])
def test_nothing_remains_of_a_body_that_is_too_long_or_cut(tmp_path: Path, is_cut: bool) -> None:
    files = BodyFiles(tmp_path)
    request = request_with(*parts_of(CONTENT, 50_000), is_cut=is_cut)

    async def main() -> None:
        async with files.receive(request, len(CONTENT) - 1 + is_cut):
            raise AssertionError("it was received")

    with pytest.raises(ClientDisconnect if is_cut else HubRefused):
        asyncio.run(main())
    assert list((tmp_path / "arriving").iterdir()) == []


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    BodyFiles(tmp_path)
    (tmp_path / "arriving" / "0123").write_bytes(b"half")
    BodyFiles(tmp_path)
    assert list((tmp_path / "arriving").iterdir()) == []


def test_failing_disk_is_told_to_the_sender(tmp_path: Path) -> None:
    files = BodyFiles(tmp_path)
    (tmp_path / "arriving").rmdir()

    async def main() -> None:
        async with files.receive(request_with(b"x"), 10):
            raise AssertionError("it was received")

    with pytest.raises(HubRefused, match="disk failed") as error:
        asyncio.run(main())
    assert (error.value.status, error.value.kind) == (503, "disk")


@pytest.mark.parametrize(("limit", "is_refused"), [(8, False), (7, True)])
def test_small_body_is_in_memory(limit: int, is_refused: bool) -> None:
    async def main() -> ArrivedBody:
        return await read_body(request_with(b"four", b"more"), limit)

    if is_refused:
        with pytest.raises(HubRefused, match="at most 7 bytes"):
            asyncio.run(main())
        return
    body = asyncio.run(main())
    assert (body.data, body.path, list(body.parts(4))) == (b"fourmore", None, [b"more"])
