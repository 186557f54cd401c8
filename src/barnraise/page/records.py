"""Records of runs as the page reads them: only the new bytes of each log, and the newest view of each run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from barnraise.agent_client.cluster_requests import AgentResponse
from barnraise.agent_client.history.requests import (
    HistoryListRequest,
    HistoryListResponse,
    HistoryPartResponse,
    HistoryRequest,
    KeptLog,
)
from barnraise.core.errors import BarnraiseError
from barnraise.history.logs.record_reader import RecordReader, next_request
from barnraise.history.view import RunView
from barnraise.history.view_builder import RunHistory

MOST_RUNS = 8  # whose entries stay in memory
_VIEW_S = 5.0  # a view without new entries stays so long
_MOST_PAGES = 64  # of the list of logs

T = TypeVar("T", bound=AgentResponse)


class RecordAsker(Protocol):
    """Machine that is asked for its records."""

    async def ask(self, request: HistoryRequest, expected: type[T]) -> T:
        """Return the response of the machine's agent."""


@dataclass
class _ReadRun:
    reader: RecordReader[RunHistory]
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    view: RunView | None = None
    built_at: float = float("-inf")


class RunRecords:
    """Records that one machine keeps. A log that cannot be read is left out, if there are others."""

    def __init__(self, asker: RecordAsker, now: Callable[[], float] = time.time) -> None:
        self._asker, self._now = asker, now
        self._runs: dict[str, _ReadRun] = {}

    async def listed(self) -> list[KeptLog]:
        """Return one log of each run that has a record, the newest runs first."""
        logs: dict[str, KeptLog] = {}
        after = ""
        for _ in range(_MOST_PAGES):
            response = await self._asker.ask(HistoryListRequest(after=after), HistoryListResponse)
            for log in response.logs:
                logs.setdefault(log.run, log)
            if not response.has_more or not response.logs:
                break
            after = response.logs[-1].run
        return list(logs.values())

    async def view(self, run: str) -> RunView | None:
        """Return the state of a run by its record; None if there is no record."""
        read = self._runs.pop(run, None) or _ReadRun(RecordReader(run, RunHistory(run)))
        self._runs[run] = read  # the newest use is last
        while len(self._runs) > MOST_RUNS:
            del self._runs[next(iter(self._runs))]
        async with read.lock:
            await self._update(read.reader)
            history = read.reader.history
            if history.is_empty:
                if read.reader.problem is not None:
                    raise read.reader.problem
                return None
            loop_now = asyncio.get_running_loop().time()
            if read.view is None or read.reader.has_news or loop_now - read.built_at >= _VIEW_S:
                read.view = await asyncio.to_thread(history.view_until_end, self._now())
                read.built_at = loop_now
            return read.view

    async def _update(self, reader: RecordReader[RunHistory]) -> None:
        """Read what is new; entries are decoded in a thread."""
        reading = reader.update()
        request = await asyncio.to_thread(next_request, reading, None)
        while request is not None:
            is_list = isinstance(request, HistoryListRequest)
            answer: AgentResponse | BarnraiseError
            try:
                answer = await self._asker.ask(
                    request, HistoryListResponse if is_list else HistoryPartResponse
                )
            except BarnraiseError as error:
                answer = error
            request = await asyncio.to_thread(next_request, reading, answer)
