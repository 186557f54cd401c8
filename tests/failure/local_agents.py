"""Real agents on this host, paired over loopback: they can be killed, and started again with their disks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import (
    AgentRequest,
    AgentResponse,
    JoinClusterRequest,
    OfferResponse,
    PairRequest,
    RenameRequest,
    RequestDone,
    Role,
    StatusRequest,
    StatusResponse,
    decode_response,
    encode,
)
from barnraise.core.errors import BarnraiseError
from benchmarks.hub.process import free_port
from tests.unit.lone_agent import unsettled

T = TypeVar("T", bound=AgentResponse)
PATIENCE_S = 120.0


class LocalAgent:
    """One machine as far as Barnraise can tell: a state directory, a port and an agent."""

    def __init__(self, room: Path, number: int) -> None:
        self.name = f"m{number}"
        self.state = room / self.name
        self.port = free_port()
        self.log = room / f"{self.name}.log"
        self.environment = unsettled(
            BARNRAISE_STATE_DIRECTORY=str(self.state),
            BARNRAISE_NETWORK_PORT=str(self.port),
            BARNRAISE_NETWORK_ADDRESSES="127.0.0.1",
            BARNRAISE_DISCOVERY_METHODS="",
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-P", "-m", "barnraise.agent"]
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        self.until(lambda: self.status() is not None, "its agent answers")

    def kill(self) -> None:
        """Kill the agent at once, without a goodbye."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait(90)

    def ask(self, question: AgentRequest, expected: type[T]) -> T:
        with ListenerClient.connect(self.state, timeout=20.0) as client:
            response = decode_response(client.ask(encode(question), PATIENCE_S))
        assert isinstance(response, expected), response
        return response

    def status(self) -> StatusResponse | None:
        try:
            return self.ask(StatusRequest(), StatusResponse)
        except BarnraiseError:
            return None

    def until(self, truth: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not truth():
            shown = self.log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, f"waited in vain until {what} ({self.name}):\n{shown}"
            time.sleep(0.05)

    def sees(self, count: int) -> bool:
        """Tell whether this machine is in a view of ``count`` machines that can decide."""
        status = self.status()
        if status is None or not (status.member and status.decides):
            return False
        return sum(row.seniority is not None for row in status.nodes) == count


@contextlib.contextmanager
def local_cluster(count: int, roles: Iterable[Role] = ()) -> Iterator[list[LocalAgent]]:
    """Run ``count`` paired agents until the context exits; ``roles``: of all but the first."""
    given = [*roles, *["owner"] * count]
    with tempfile.TemporaryDirectory(prefix="by-", ignore_cleanup_errors=os.name == "nt") as room:
        agents = [LocalAgent(Path(room), number) for number in range(count)]
        try:
            for agent in agents:
                agent.start()
                agent.ask(RenameRequest(agent.name), RequestDone)
            first = agents[0]
            for joiner, role in zip(agents[1:], given, strict=False):
                code = first.ask(PairRequest(role), OfferResponse).code
                joiner.ask(JoinClusterRequest(code, at=f"127.0.0.1:{first.port}"), RequestDone)
            for agent in agents:
                agent.until(lambda agent=agent: agent.sees(count), "all are online")  # type: ignore[misc]
            yield agents
        finally:
            for agent in agents:
                agent.kill()
