"""Source of the records of runs: this machine's agent, or without one the files that it keeps."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TypeVar

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import AgentResponse, decode_response, encode
from barnraise.agent_client.history.requests import (
    HistoryListRequest,
    HistoryListResponse,
    HistoryPartRequest,
    HistoryPartResponse,
    HistoryRequest,
    KeptLog,
)
from barnraise.agent_client.run_requests import RunRow, WatchRequest, WatchResponse
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import ListenerError, ProtocolError, RunError
from barnraise.core.names import NamedItem, match_name
from barnraise.core.sanitize import printable
from barnraise.display.row_view import is_silent, with_end
from barnraise.history.log_file import RecordPart, history_directory, logs_of, read_part
from barnraise.history.logs.record_reader import ReaderRequest, RecordReader, Store, read_all
from barnraise.history.view import RunView
from barnraise.history.view_builder import RunHistory

_ANSWER_S = 20.0
_log = logging.getLogger(__name__)

T = TypeVar("T", HistoryListResponse, HistoryPartResponse, WatchResponse)


class HistorySource:
    """Records of the runs that this machine knows. If there are others, a damaged log is left out."""

    def __init__(self) -> None:
        self._state = state_directory(load_settings())
        self._readers: dict[str, RecordReader[RunHistory]] = {}
        try:
            self._client: ListenerClient | None = ListenerClient.connect(self._state)
        except ListenerError:
            self._client = None

    def runs(self) -> dict[str, list[KeptLog]]:
        """Return the logs of all runs, those that changed last first."""
        logs = self._list() if self._client is not None else _listed(self._state)
        by_run: dict[str, list[KeptLog]] = {}
        for log in logs:
            by_run.setdefault(log.run, []).append(log)
        return by_run

    def find(self, text: str) -> str:
        """Return the name of a run by its beginning; raise RunError unless exactly one matches."""
        runs = self.runs()
        if not runs:
            raise RunError("this machine keeps no record of a run", hint="Start one: barnraise run SCRIPT")
        match = match_name(text, (NamedItem(run, run) for run in runs), kind="run", exact=False)
        if match.value is None:
            raise RunError(match.problem, hint=match.hint)
        return match.value

    def newest(self) -> str:
        """Return the name of the run whose record changed last; raise RunError if there is none."""
        return next(iter(self.runs()), "") or self.find("")

    def view(self, run: str) -> RunView:
        """Return what is shown of a run; a later look reads only what is new."""
        reader = self._readers.setdefault(run, RecordReader(run, RunHistory(run)))
        self.read(reader)
        return self.with_end(reader.history.view_until_end(time.time()))

    def with_end(self, view: RunView) -> RunView:
        """Return the view of a record with the end that it lacks; of a silent one, the agent is asked.

        Without an agent, only a script that had none is known to have ended: others may train elsewhere.
        """
        now = time.time()
        if not is_silent(view, now) or (self._client is None and any(logs_of(self._state, view.run))):
            return view
        return with_end(view, self._row(view.run), now)

    def read(self, reader: RecordReader[Store]) -> None:
        """Read what is new of a run; raise RunError if there is no record of it."""
        read_all(reader.update(), self._answer)
        if reader.problem is not None:
            _log.warning("a log of run %s is left out: %s", reader.run, printable(reader.problem.message))
        if reader.history.is_empty:
            raise reader.problem or RunError(f"there is no record of run {reader.run}")

    def _row(self, run: str) -> RunRow | None:
        """Return what the agent knows of a run; None if it knows nothing, or if there is no agent."""
        if self._client is None:
            return None
        try:
            row = self._ask(WatchRequest(run=run, wait_s=0.0), WatchResponse).row
        except RunError:
            return None
        return row if row.run == run else None

    def _list(self) -> list[KeptLog]:
        logs: list[KeptLog] = []
        while True:
            response = self._ask(HistoryListRequest(after=logs[-1].run if logs else ""), HistoryListResponse)
            logs.extend(response.logs)
            if not response.has_more or not response.logs:
                return logs

    def _answer(self, request: ReaderRequest) -> AgentResponse:
        if isinstance(request, HistoryPartRequest):
            part = self._part(request.run, request.node, request.identity, request.offset)
            return HistoryPartResponse(*part)
        if self._client is None:
            return HistoryListResponse(tuple(_listed(self._state)))
        return self._ask(request, HistoryListResponse)

    def _part(self, run: str, node: bytes, identity: bytes, offset: int) -> RecordPart:
        if self._client is None:
            return read_part(logs_of(self._state, run)[node], identity, offset)
        response = self._ask(HistoryPartRequest(run, node, identity, offset), HistoryPartResponse)
        return RecordPart(response.identity, response.offset, response.data, response.size)

    def _ask(self, request: HistoryRequest | WatchRequest, expected: type[T]) -> T:
        assert self._client is not None
        response = decode_response(self._client.ask(encode(request), _ANSWER_S))
        if not isinstance(response, expected):
            raise ProtocolError(f"the agent answered {type(response).__name__} about a run")
        return response


def _listed(state: Path) -> list[KeptLog]:
    """Return the logs on the disk, those that changed last first."""
    logs = []
    directory = history_directory(state)
    for folder in directory.iterdir() if directory.is_dir() else ():
        for node, path in logs_of(state, folder.name).items():
            facts = path.stat()
            logs.append(KeptLog(folder.name, node, facts.st_size, facts.st_mtime))
    return sorted(logs, key=lambda log: -log.changed_at)
