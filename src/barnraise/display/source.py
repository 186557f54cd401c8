"""Source of the records of runs: this machine's agent, or without one the files that it keeps."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import NamedTuple, TypeVar

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import decode_response, encode
from barnraise.agent_client.history.requests import (
    HistoryListRequest,
    HistoryListResponse,
    HistoryPartRequest,
    HistoryPartResponse,
    HistoryRequest,
    KeptLog,
)
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import BarnraiseError, ListenerError, ProtocolError, RunError
from barnraise.core.names import NamedItem, match_name
from barnraise.core.sanitize import printable
from barnraise.history.entries import Entry
from barnraise.history.log_file import RecordPart, history_directory, logs_of, read_part
from barnraise.history.log_format import decode_frames
from barnraise.history.merge import merge
from barnraise.history.view import RunView
from barnraise.history.view_builder import build_view

_ANSWER_S = 20.0
_log = logging.getLogger(__name__)

T = TypeVar("T", HistoryListResponse, HistoryPartResponse)


class KnownLog(NamedTuple):
    """Log as far as it was read. ``identity``: of the file; ``size``: bytes of its whole frames."""

    identity: bytes
    size: int
    entries: tuple[Entry, ...]


_NOTHING = KnownLog(b"", 0, ())


class HistorySource:
    """Records of the runs that this machine knows. If there are others, a damaged log is left out."""

    def __init__(self) -> None:
        self._state = state_directory(load_settings())
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

    def entries(self, run: str) -> tuple[Entry, ...]:
        """Return the history of a run, merged of all its logs."""
        return merge(self.logs(run))

    def logs(self, run: str, known: dict[bytes, KnownLog] | None = None) -> list[tuple[Entry, ...]]:
        """Return the entries of each log of a run.

        ``known``: what an earlier call has read, by machine. Only what is new is read, and added to it.
        """
        known = {} if known is None else known
        logs, problems = [], []
        for log in self.runs().get(run, ()):
            try:
                known[log.node] = self._read(run, log.node, known.get(log.node, _NOTHING))
                logs.append(known[log.node].entries)
            except BarnraiseError as error:
                problems.append(error)
        for problem in problems:
            _log.warning("a log of run %s is left out: %s", run, printable(problem.message))
        if not logs:
            raise problems[0] if problems else RunError(f"there is no record of run {run}")
        return logs

    def newest(self) -> str:
        """Return the name of the run whose record changed last; raise RunError if there is none."""
        return next(iter(self.runs()), "") or self.find("")

    def view(self, run: str) -> RunView:
        """Return what is shown of a run."""
        view = build_view(self.entries(run), run=run)
        return view if view.ended_at is not None else build_view(self.entries(run), run=run, now=time.time())

    def _list(self) -> list[KeptLog]:
        logs: list[KeptLog] = []
        while True:
            response = self._ask(HistoryListRequest(after=logs[-1].run if logs else ""), HistoryListResponse)
            logs.extend(response.logs)
            if not response.has_more or not response.logs:
                return logs

    def _read(self, run: str, node: bytes, known: KnownLog) -> KnownLog:
        """Return all whole frames of a log; start again if it was replaced."""
        identity, size, entries = known.identity, known.size, list(known.entries)
        while True:
            part = self._part(run, node, identity, size)
            if part.offset == 0:
                identity, size, entries = part.identity, 0, []
            decoded = decode_frames(part.data)
            entries += decoded.entries
            size += decoded.size
            if size >= part.size or not decoded.size:
                is_same = (identity, size) == (known.identity, known.size)
                return known if is_same else KnownLog(identity, size, tuple(entries))

    def _part(self, run: str, node: bytes, identity: bytes, offset: int) -> RecordPart:
        if self._client is None:
            return read_part(logs_of(self._state, run)[node], identity, offset)
        response = self._ask(HistoryPartRequest(run, node, identity, offset), HistoryPartResponse)
        return RecordPart(response.identity, response.offset, response.data, response.size)

    def _ask(self, request: HistoryRequest, expected: type[T]) -> T:
        assert self._client is not None
        response = decode_response(self._client.ask(encode(request), _ANSWER_S))
        if not isinstance(response, expected):
            raise ProtocolError(f"the agent answered {type(response).__name__} about a record")
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
