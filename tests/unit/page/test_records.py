"""Records as the page reads them: in parts, again after a replacement, and without damaged logs."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import pytest

from barnraise.agent_client.cluster_requests import AgentResponse
from barnraise.agent_client.history.requests import (
    HistoryListRequest,
    HistoryListResponse,
    HistoryPartRequest,
    HistoryPartResponse,
    HistoryRequest,
    KeptLog,
)
from barnraise.core.errors import ProtocolError
from barnraise.history.entries import NoteEntry
from barnraise.history.log_format import encode_frames, whole_frames
from barnraise.page.records import RunRecords
from benchmarks.invented_run import DESK, MAC, RUN, START, example_run

T = TypeVar("T", bound=AgentResponse)
PART = 4096


class Keeper:
    """Machine that keeps logs in memory, and gives them in small parts."""

    def __init__(self) -> None:
        self.logs: dict[bytes, tuple[bytes, bytes]] = {}  # identity and bytes, by machine
        self.parts = 0

    async def ask(self, request: HistoryRequest, expected: type[T]) -> T:
        """Answer as an agent does."""
        answer: AgentResponse
        if isinstance(request, HistoryListRequest):
            answer = HistoryListResponse(
                tuple(KeptLog(RUN, node, len(data), 1.0) for node, (_, data) in self.logs.items())
            )
        else:
            assert isinstance(request, HistoryPartRequest)
            self.parts += 1
            identity, data = self.logs[request.node]
            start = request.offset if request.identity == identity else 0
            part = data[start : start + 64 * PART]
            answer = HistoryPartResponse(identity, start, part[: whole_frames(part)], len(data))
        assert isinstance(answer, expected)
        return answer

    def keep(self, node: bytes, *batches: list, identity: bytes = b"1" * 16) -> None:  # type: ignore[type-arg]
        """Keep a log of these batches of entries, one frame each."""
        self.logs[node] = identity, b"".join(map(encode_frames, batches))


def _batches(last: int) -> list[list]:  # type: ignore[type-arg]
    entries = example_run(last)
    return [entries[start : start + 50] for start in range(0, len(entries), 50)]


def test_only_new_bytes_are_read_and_a_replaced_log_is_read_again() -> None:
    async def go() -> None:
        keeper = Keeper()
        records = RunRecords(keeper, lambda: START + 900)
        assert await records.view(RUN) is None
        keeper.keep(DESK, *_batches(300))
        view = await records.view(RUN)
        assert view is not None
        assert (view.step, view.state) == (300, "running")
        assert await records.view(RUN) is view  # nothing is new
        keeper.logs[DESK] = (
            keeper.logs[DESK][0],
            keeper.logs[DESK][1] + encode_frames([NoteEntry(START, "news")]),
        )
        view = await records.view(RUN)
        assert view is not None
        assert any(event.text == "news" for event in view.events)
        keeper.keep(DESK, *_batches(450), identity=b"2" * 16)
        view = await records.view(RUN)
        assert view is not None
        assert view.step == 450
        assert not any(event.text == "news" for event in view.events)

    asyncio.run(go())


def test_logs_of_several_machines_are_merged() -> None:
    async def go() -> None:
        keeper = Keeper()
        records = RunRecords(keeper)
        batches = _batches(600)
        keeper.keep(DESK, *batches)
        keeper.keep(MAC, *batches)
        view = await records.view(RUN)
        assert view is not None
        assert (view.step, view.state, view.missing) == (600, "ended", 0)

    asyncio.run(go())


def test_record_that_cannot_be_read_is_an_error() -> None:
    class Broken(Keeper):
        async def ask(self, request: HistoryRequest, expected: type[T]) -> T:
            if isinstance(request, HistoryPartRequest):
                raise ProtocolError("the record of a run cannot be read")
            return await super().ask(request, expected)

    async def go() -> None:
        keeper = Broken()
        keeper.keep(DESK, *_batches(10))
        with pytest.raises(ProtocolError):
            await RunRecords(keeper).view(RUN)

    asyncio.run(go())
