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
    HistoryPartRequest,
    HistoryPartResponse,
    HistoryRequest,
    KeptLog,
)
from barnraise.core.errors import BarnraiseError
from barnraise.history.entries import Entry
from barnraise.history.log_format import decode_frames
from barnraise.history.view import RunView
from barnraise.history.view_builder import build_view

MOST_RUNS = 8  # whose entries stay in memory
MAX_LOG = 16 << 20  # of one machine
_VIEW_S = 5.0  # a view without new entries stays so long
_MOST_PAGES = 64  # of the list of logs

T = TypeVar("T", bound=AgentResponse)


class RecordAsker(Protocol):
    """Machine that is asked for its records."""

    async def ask(self, request: HistoryRequest, expected: type[T]) -> T:
        """Return the response of the machine's agent."""


@dataclass
class _ReadLog:
    """Part of one machine's log that was read."""

    identity: bytes = b""
    offset: int = 0
    entries: list[Entry] = field(default_factory=list)


@dataclass
class _ReadRun:
    logs: dict[bytes, _ReadLog] = field(default_factory=dict)
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
        read = self._runs.pop(run, None) or _ReadRun()
        self._runs[run] = read  # the newest use is last
        while len(self._runs) > MOST_RUNS:
            del self._runs[next(iter(self._runs))]
        async with read.lock:
            has_news = await self._read(run, read)
            entries = [entry for log in read.logs.values() for entry in log.entries]
            if not entries:
                return None
            loop_now = asyncio.get_running_loop().time()
            if read.view is None or has_news or loop_now - read.built_at >= _VIEW_S:
                read.view = await asyncio.to_thread(self._built, run, entries)
                read.built_at = loop_now
            return read.view

    def _built(self, run: str, entries: list[Entry]) -> RunView:
        """Build a view; of a run that has ended, as of its end."""
        view = build_view(entries, run=run, now=self._now())
        return view if view.ended_at is None else build_view(entries, run=run)

    async def _read(self, run: str, read: _ReadRun) -> bool:
        """Read what is new in all logs of a run, and tell whether there was something."""
        response = await self._asker.ask(HistoryListRequest(run=run), HistoryListResponse)
        nodes = [log.node for log in response.logs if log.run == run]
        problems, has_news = [], False
        for node in nodes:
            try:
                has_news |= await self._read_log(run, node, read.logs.setdefault(node, _ReadLog()))
            except BarnraiseError as error:
                problems.append(error)
        if problems and not any(log.entries for log in read.logs.values()):
            raise problems[0]
        return has_news

    async def _read_log(self, run: str, node: bytes, log: _ReadLog) -> bool:
        has_news = False
        while log.offset < MAX_LOG:
            request = HistoryPartRequest(run, node, log.identity, log.offset)
            part = await self._asker.ask(request, HistoryPartResponse)
            if part.identity != log.identity or part.offset != log.offset:  # replaced, or the first part
                log.identity, log.offset, log.entries = part.identity, 0, []
            decoded = await asyncio.to_thread(decode_frames, part.data)
            if part.offset != log.offset or not decoded.size:
                break
            log.offset += decoded.size
            log.entries.extend(decoded.entries)
            has_news = True
            if log.offset >= part.size:
                break
        return has_news
