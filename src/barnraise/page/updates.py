"""Updates of an open page as server-sent events: only the parts that have changed, about once a second."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from barnraise.core.errors import BarnraiseError
from barnraise.core.sanitize import printable

EVERY_S = 1.0
MOST_STREAMS = 16
_KEEP_ALIVE_S = 15.0
_MOST_KEPT = 32

CHART = "chart"  # name of the part that is JSON
Parts = Mapping[str, str]  # by name; HTML but for the chart
Build = Callable[[], Awaitable[Parts]]


@dataclass
class _Kept:
    """Newest parts of one page."""

    at: float = float("-inf")
    parts: Parts = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class PageUpdates:
    """Streams of all open pages; pages with the same content share the work."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self.streams = 0

    async def parts(self, page: str, build: Build) -> Parts:
        """Return the parts of a page, at most a second old."""
        kept = self._kept.pop(page, None) or _Kept()
        self._kept[page] = kept  # the newest use is last
        while len(self._kept) > _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        async with kept.lock:
            now = asyncio.get_running_loop().time()
            if now - kept.at >= 0.9 * EVERY_S:
                kept.parts = await build()
                kept.at = asyncio.get_running_loop().time()
            return kept.parts

    async def stream(
        self, page: str, build: Build, is_open: Callable[[], bool], known: str
    ) -> AsyncIterator[str]:
        """Yield events until the session ends; a failure is told, and the page says since when.

        ``known``: digest of the parts that the page has already.
        """
        sent: dict[str, str] = {}
        loop = asyncio.get_running_loop()
        self.streams += 1
        told_at, failure = loop.time(), ""
        try:
            while is_open():
                try:
                    parts = await self.parts(page, build)
                except BarnraiseError as error:
                    if printable(error.message) != failure:
                        failure, told_at = printable(error.message), loop.time()
                        yield encode_event("failure", failure)
                    parts = {}
                else:
                    if failure or not sent:
                        failure, told_at = "", loop.time()
                        yield encode_event("fresh", "")
                        if not sent and digest_of(parts) == known:
                            sent = {name: text for name, text in parts.items() if name != CHART}
                for name, content in parts.items():
                    if sent.get(name) != content:
                        sent[name], told_at = content, loop.time()
                        yield encode_event(name, content)
                if loop.time() - told_at >= _KEEP_ALIVE_S:
                    told_at = loop.time()
                    yield ": still here\n\n"
                await asyncio.sleep(EVERY_S)
            yield encode_event("closed", "")
        finally:
            self.streams -= 1


def digest_of(parts: Parts) -> str:
    """Return a short hash of the parts."""
    return hashlib.blake2b(json.dumps(sorted(parts.items())).encode(), digest_size=8).hexdigest()


def encode_event(name: str, content: str) -> str:
    """Return one server-sent event; JSON keeps line ends out of its data."""
    return f"event: part\ndata: {json.dumps([name, content])}\n\n"
