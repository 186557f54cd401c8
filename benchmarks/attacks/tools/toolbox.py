"""Common parts of an attacker's tools: their list, and connections that tolerate every failure."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

LIMIT_S = 180.0  # for one tool
STRAY = "barnraise-stray"  # file that attacks try to write; no other program has one of this name
_CONNECT_S = 5.0

Result = dict[str, Any]
Tool = Callable[..., Awaitable[Result]]
TOOLS: dict[str, Tool] = {}
# What a tool calls once it has begun to hurt.
READY: ContextVar[Callable[[], None]] = ContextVar("ready", default=lambda: None)


def tool(function: Tool) -> Tool:
    """Make it known under its name."""
    TOOLS[function.__name__] = function
    return function


async def say(host: str, port: int, words: bytes, seconds: float = 3.0) -> bytes:
    """Send bytes and return the reply, until the other side closes the connection or the time is over."""
    heard = b""
    opened = await connect(host, port)
    if opened is None:
        return heard
    source, sink = opened
    with contextlib.suppress(OSError, TimeoutError):
        sink.write(words)
        async with asyncio.timeout(seconds):
            while data := await source.read(65536):
                heard += data
    sink.transport.abort()
    return heard


async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    try:
        return await asyncio.wait_for(asyncio.open_connection(host, port), _CONNECT_S)
    except (OSError, TimeoutError):
        return None


async def until_end(source: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await source.read(65536):
            pass


def more_descriptors() -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard_limit, 8192), hard_limit))
