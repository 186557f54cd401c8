"""Source of the screen: asks this machine's agent for the state of one run."""

from __future__ import annotations

import time

from barnraise.agent_client.cluster_requests import StatusRequest, StatusResponse
from barnraise.agent_client.run_requests import WatchRequest, WatchResponse
from barnraise.cli.agent_call import ask
from barnraise.cli.runs.progress.waiting_line import awaited
from barnraise.cli.watch.row_view import view_of_row
from barnraise.cli.watch.snapshot import Snapshot

_STATUS_S = 5.0  # between two looks at the cluster


class RunSource:
    """State of one run, asked of the agent of this machine. Its calls wait for the answer."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._status: StatusResponse | None = None
        self._status_at = float("-inf")

    def look(self) -> Snapshot:
        """Return the state of the run now; raise BarnraiseError if the agent does not answer."""
        response = ask(WatchRequest(run=self.run, wait_s=0.0), WatchResponse, offer_start=False)
        self.run = response.row.run
        now = time.monotonic()
        if now - self._status_at >= _STATUS_S:
            self._status = ask(StatusRequest(), StatusResponse, offer_start=False)
            self._status_at = now
        names = set(response.row.machines)
        nodes = self._status.nodes if self._status is not None else ()
        return Snapshot(
            view=view_of_row(response, self._status, time.time()),
            waits_for=awaited(response, has_output=True) if response.row.progress is None else "",
            user_pauses={node.name: node.paused for node in nodes if node.paused and node.name in names},
        )
