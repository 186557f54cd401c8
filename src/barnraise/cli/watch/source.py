"""Source of the screen: asks this machine's agent for the record of a run, and for what the run does now."""

from __future__ import annotations

import time

from barnraise.agent_client.cluster_requests import AgentResponse, NodeRow, StatusRequest, StatusResponse
from barnraise.agent_client.history.requests import (
    HistoryListRequest,
    HistoryListResponse,
    HistoryPartResponse,
)
from barnraise.agent_client.run_requests import WatchRequest, WatchResponse
from barnraise.cli.agent_call import ask
from barnraise.cli.runs.progress.waiting_line import awaited, stall_reason
from barnraise.cli.watch.snapshot import Snapshot
from barnraise.core.errors import RunError
from barnraise.display.row_view import view_of_row, with_end
from barnraise.history.logs.record_reader import ReaderRequest, RecordReader, read_all
from barnraise.history.view import RunView
from barnraise.history.view_builder import RunHistory

_STATUS_S = 5.0  # between two looks at the cluster


class RunSource:
    """State of one run, asked of the agent of this machine. Its calls wait for the answers."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._record: RecordReader[RunHistory] | None = None
        self._status: StatusResponse | None = None
        self._status_at = float("-inf")

    def look(self) -> Snapshot:
        """Return the state of the run now; raise BarnraiseError if the agent does not answer."""
        response = self._ask_run()
        if response is not None:
            self.run = response.row.run
        if self._record is None:
            self._record = RecordReader(self.run, RunHistory(self.run))
        read_all(self._record.update(), _ask)
        now = time.monotonic()
        if now - self._status_at >= _STATUS_S:
            self._status = ask(StatusRequest(), StatusResponse, offer_start=False)
            self._status_at = now
        view = self._view(response)
        return Snapshot(
            view=view,
            waits_for=_waits_for(response, view) if response is not None else "",
            user_pauses=_pauses(view, self._status.nodes if self._status is not None else ()),
        )

    def _ask_run(self) -> WatchResponse | None:
        """Return what the cluster knows of the run; None if only its record is left."""
        try:
            return ask(WatchRequest(run=self.run, wait_s=0.0), WatchResponse, offer_start=False)
        except RunError:
            if self._record is None:
                self._record = RecordReader(self.run, RunHistory(self.run))
                read_all(self._record.update(), _ask)
                if self._record.history.is_empty:
                    raise
            return None

    def _view(self, response: WatchResponse | None) -> RunView:
        now = time.time()
        assert self._record is not None
        if self._record.history.is_empty:
            assert response is not None
            return view_of_row(response, self._status, now)
        view = self._record.history.view(now)
        return with_end(view, response.row if response is not None else None, now)


def _ask(request: ReaderRequest) -> AgentResponse:
    expected = HistoryListResponse if isinstance(request, HistoryListRequest) else HistoryPartResponse
    return ask(request, expected, offer_start=False)


def _waits_for(response: WatchResponse, view: RunView) -> str:
    """Return what the run waits for; an empty text if it trains."""
    if response.row.phase != "running" or view.step == view.first_step:
        return awaited(response, has_output=True)
    return stall_reason(response.workers)


def _pauses(view: RunView, nodes: tuple[NodeRow, ...]) -> dict[str, str]:
    names = {machine.name for machine in view.machines}
    return {node.name: node.paused for node in nodes if node.paused and node.name in names}
