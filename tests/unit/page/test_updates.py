"""Streams of updates: pages share the work, failures are told once, and a closed session ends them."""

from __future__ import annotations

import asyncio
import json

import pytest

from barnraise.core.errors import TransportError
from barnraise.page import updates
from barnraise.page.updates import PageUpdates, Parts, digest_of


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let streams look for changes all the time."""
    monkeypatch.setattr(updates, "EVERY_S", 0.0)


def _decoded(events: list[str]) -> list[list[str]]:
    return [json.loads(event.split("data: ")[1]) for event in events if "data: " in event]


def test_two_streams_share_one_build(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        monkeypatch.setattr(updates, "EVERY_S", 60.0)
        kept, built = PageUpdates(), []

        async def build() -> Parts:
            built.append(1)
            return {"state": "a"}

        results = await asyncio.gather(*(kept.parts("page", build) for _ in range(5)))
        assert results == [{"state": "a"}] * 5
        assert len(built) == 1

    asyncio.run(go())


def test_stream_tells_failures_once_and_ends_with_the_session() -> None:
    async def go() -> None:
        stream, count = PageUpdates(), 0
        answers: list[Parts | None] = [{"a": "1"}, None, None, {"a": "1", "b": "2"}]

        async def build() -> Parts:
            answer = answers[min(count, len(answers)) - 1]
            if answer is None:
                raise TransportError("mac is not connected\x1b[31m")
            return answer

        def is_open() -> bool:
            nonlocal count
            count += 1
            return count <= len(answers)

        events = [event async for event in stream.stream("p", build, is_open, "")]
        assert _decoded(events) == [
            ["fresh", ""],
            ["a", "1"],
            ["failure", "mac is not connected?[31m"],
            ["fresh", ""],
            ["b", "2"],
            ["closed", ""],
        ]
        assert stream.streams == 0

    asyncio.run(go())


def test_page_that_is_current_gets_only_its_chart() -> None:
    async def go() -> None:
        parts = {"state": "a", "chart": "{}"}
        is_first = iter([True, False])

        async def build() -> Parts:
            return parts

        stream = PageUpdates().stream("p", build, lambda: next(is_first), digest_of(parts))
        assert _decoded([event async for event in stream])[:2] == [["fresh", ""], ["chart", "{}"]]

    asyncio.run(go())
