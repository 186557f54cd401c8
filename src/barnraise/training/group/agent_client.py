"""Client of the local agent for group membership: polls the group and reports this worker's status."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import decode_response, encode
from barnraise.agent_client.run_requests import (
    MOST_WORDS,
    GraphRequest,
    GraphResponse,
    GroupRequest,
    GroupResponse,
)
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import BarnraiseError, PeerLost, RunError
from barnraise.core.flow.wait_reporter import WaitReporter
from barnraise.topology.graph import TopologyGraph, decode_graph

log = logging.getLogger("barnraise.training")

_REQUEST_S = 5.0
_FIRST_REPORT_S = 10.0
_LAST_REPORT_S = 600.0


class WorkerId(NamedTuple):
    """The identity of this worker towards its agent."""

    run: str
    local_rank: int
    start: int
    state: Path
    node: str

    @classmethod
    def from_environment(cls) -> WorkerId | None:
        """Return None in a process that no agent launched; such a process trains alone."""
        if not os.environ.get("BARNRAISE_LAUNCHED"):
            return None
        return cls(
            os.environ["BARNRAISE_RUN"],
            int(os.environ["LOCAL_RANK"]),
            int(os.environ["BARNRAISE_START"]),
            state_directory(load_settings()),
            os.environ["BARNRAISE_NODE"],
        )


def read_topology(state: Path) -> TopologyGraph:
    """Ask the agent of this state directory for the topology that the agents have measured."""
    with ListenerClient.connect(state) as client:
        response = decode_response(client.ask(encode(GraphRequest()), _REQUEST_S))
    if not isinstance(response, GraphResponse):
        raise RunError("the agent did not answer with a topology graph")
    return decode_graph(response.graph)


class AgentGroupClient:
    """Long-polling client for the group of one worker.

    ``generation``: the group that this worker is in. ``response``: the agent's newest answer.
    ``on_broken`` is called when the agent knows that the current group has lost a worker.
    """

    def __init__(self, worker: WorkerId, on_broken: Callable[[], None]) -> None:
        self.worker = worker
        self.generation = 0
        self.failed_recovery = 0  # the last recovery attempt that failed
        self.response: GroupResponse | None = None
        self._on_broken = on_broken
        self._has_failed = False
        self._lost_ranks: tuple[int, ...] = ()
        self._has_caught_up = self._has_trained = False
        self._waiting_for = ""
        self._pause: tuple[int, tuple[bytes, ...], str] = (0, (), "")  # generation, nodes, reason
        self._changed = threading.Condition()
        self._error = ""
        threading.Thread(target=self._poll, name="barnraise-group", daemon=True).start()

    def survey(self) -> TopologyGraph:
        """Return the topology that the agents have measured."""
        return read_topology(self.worker.state)

    def wait_for(self, accepts: Callable[[GroupResponse], bool]) -> GroupResponse:
        """Block, without a time limit, until the agent's answer is accepted.

        There is no limit because this worker may be the last one that holds the training state.
        """
        reporter = WaitReporter(_FIRST_REPORT_S, 2 * _FIRST_REPORT_S, max_interval_s=_LAST_REPORT_S)
        with self._changed:
            while True:
                response = self.response
                if response is not None and accepts(response):
                    return response
                if reporter.is_due():
                    status = response.sentence if response is not None else "the agent has not answered"
                    reason = self._error or status
                    log.warning("waiting for %.0f s for a group to train in: %s", reporter.waited_s, reason)
                self._changed.wait(0.5)

    # reports

    def report_failure(self, error: Exception | None) -> None:
        """Report that this worker needs a new group, and which rank it has lost."""
        self._lost_ranks = (error.peer,) if isinstance(error, PeerLost) else ()
        self._has_failed = True
        if self.generation:
            self._send_status()

    def clear_failure(self) -> None:
        """Forget what was reported about the last group."""
        self._has_failed, self._lost_ranks, self._has_caught_up = False, (), False

    def report_recovery_failed(self, attempt: int) -> None:
        """Report that a recovery attempt failed."""
        self.failed_recovery, self._has_caught_up = attempt, False
        self._send_status()

    def report_caught_up(self) -> None:
        """Report, once, that this joining worker can join the group."""
        if not self._has_caught_up:
            self._has_caught_up = True
            self._send_status()

    def report_trained(self) -> None:
        """Report, once, that this worker has committed a step."""
        if not self._has_trained:
            self._has_trained = True
            self._send_status()

    def report_waiting(self, reason: str) -> None:
        """Report what this worker waits for."""
        if self._waiting_for != reason[:MOST_WORDS]:
            self._waiting_for = reason[:MOST_WORDS]
            self._send_status()

    def request_pause(self, nodes: Sequence[str], reason: str) -> None:
        """Propose to pause these machines; valid for the current generation only."""
        self._pause = self.generation, tuple(map(bytes.fromhex, nodes)), reason[:MOST_WORDS]
        self._send_status()

    def _request(self, version: int, wait_s: float) -> GroupRequest:
        """Build the request, which carries this worker's whole status."""
        run, local_rank, start, *_ = self.worker
        generation = self.generation or self.failed_recovery
        has_failed = generation > 0 and (self._has_failed or self.generation == 0)
        pause_generation, paused, reason = self._pause
        is_current = pause_generation == self.generation
        return GroupRequest(
            run,
            local_rank,
            start,
            version,
            wait_s,
            generation,
            has_failed,
            self._lost_ranks if has_failed else (),
            self._has_caught_up,
            self._has_trained,
            self._waiting_for,
            paused if is_current else (),
            reason if is_current else "",
        )

    def _send_status(self) -> None:
        """Send the status on a second connection, because the first one waits for news."""
        try:
            with ListenerClient.connect(self.worker.state) as client:
                client.ask(encode(self._request(0, 0.0)), _REQUEST_S)
        except BarnraiseError as error:
            log.info("the status was not sent to the agent: %s", error.message)

    def _poll(self) -> None:
        """Ask the agent again and again; it answers when there is news."""
        version = 0
        while True:
            try:
                with ListenerClient.connect(self.worker.state) as client:
                    while True:
                        request = self._request(version, _REQUEST_S)
                        response = decode_response(client.ask(encode(request), _REQUEST_S * 3))
                        if not isinstance(response, GroupResponse):
                            raise RunError("the agent did not answer with a group")
                        version = response.version
                        if response.broken and request.generation == self.generation:
                            self._on_broken()
                        with self._changed:
                            self.response, self._error = response, ""
                            self._changed.notify_all()
            except BarnraiseError as error:
                self._error = error.message
                time.sleep(0.2)
