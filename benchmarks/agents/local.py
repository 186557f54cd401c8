"""Real agents that share one computer and one network, without root: each has its own port and directory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from barnraise.agent_client.cluster_requests import (
    AgentRequest,
    AgentResponse,
    JoinClusterRequest,
    OfferResponse,
    PairRequest,
    RenameRequest,
    RequestDone,
    StatusRequest,
    StatusResponse,
)
from barnraise.agent_client.queue.requests import QueueRequest
from barnraise.agent_client.run_requests import RunRequest
from barnraise.core.errors import BarnraiseError
from benchmarks.agents.machines import REPOSITORY, ask_agent, until

T = TypeVar("T", bound=AgentResponse)
_PATIENCE_S = 180.0


class LocalAgents:
    """Several agents on this computer, called h0, h1 and so on. Any may start or die at any time."""

    def __init__(self, count: int) -> None:
        # A short path: the local socket's name must fit into 107 bytes.
        self._directory = tempfile.TemporaryDirectory(prefix="by-l-", ignore_cleanup_errors=True)
        self.root = Path(self._directory.name)
        self.count = count
        self.ports = [free_port() for _ in range(count)]
        self.agents: list[subprocess.Popen[bytes] | None] = [None] * count
        self._discovery = free_port()
        (self.root / "config.toml").touch()
        for place in range(count):
            self.state(place).mkdir(mode=0o700)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for place in range(self.count):
            self.kill(place)
        self._directory.cleanup()

    def state(self, place: int) -> Path:
        """Return the state directory of an agent."""
        return self.root / str(place)

    def environment(self, place: int) -> dict[str, str]:
        """Return the environment of an agent and of commands that use it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")}
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)]),
            "BARNRAISE_CONFIG": str(self.root / "config.toml"),
            "BARNRAISE_STATE_DIRECTORY": str(self.state(place)),
            "BARNRAISE_NETWORK_PORT": str(self.ports[place]),
            "BARNRAISE_NETWORK_DISCOVERY_PORT": str(self._discovery),
            "BARNRAISE_NETWORK_ADDRESSES": "127.0.0.1",
        }

    def start(self, place: int) -> None:
        """Start an agent and wait until it answers."""
        assert self.agents[place] is None
        with open(self.root / f"{place}.log", "ab") as log:
            self.agents[place] = subprocess.Popen(
                [sys.executable, "-P", "-m", "barnraise.agent"],
                env=self.environment(place),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.until(lambda: self.answers(place), f"agent {place} answers")

    def kill(self, place: int) -> None:
        """Kill an agent at once, without a goodbye; its workers die with it."""
        agent = self.agents[place]
        if agent is not None:
            agent.send_signal(signal.SIGKILL)
            agent.wait()
            self.agents[place] = None

    def form(self) -> None:
        """Start all agents, and pair each with the first."""
        for place in range(self.count):
            self.start(place)
            self.ask(place, RenameRequest(f"h{place}"), RequestDone)
        for place in range(1, self.count):
            code = self.ask(0, PairRequest(), OfferResponse).code
            question = JoinClusterRequest(code, at=f"127.0.0.1:{self.ports[0]}", patience_s=_PATIENCE_S)
            self.ask(place, question, RequestDone, 2 * _PATIENCE_S)
        self.until(lambda: self.members(0) == self.count, "all agree")

    def restore(self) -> None:
        """Start the agents that were killed, and wait until each has all machines in its view."""
        places = range(self.count)
        for place in places:
            if self.agents[place] is None:
                self.start(place)
        self.until(lambda: all(self.members(place) == self.count for place in places), "all are here")

    def members(self, place: int) -> int:
        """Return the number of machines in the view of an agent."""
        rows = self.ask(place, StatusRequest(), StatusResponse).nodes
        return sum(row.seniority is not None for row in rows)

    def coordinator(self, place: int) -> int:
        """Return the number of the coordinator, as an agent sees it."""
        return int(self.ask(place, StatusRequest(), StatusResponse).coordinator.removeprefix("h"))

    def answers(self, place: int) -> bool:
        """Tell whether an agent answers."""
        try:
            return bool(self.ask(place, StatusRequest(), StatusResponse, 5.0).nodes)
        except BarnraiseError:
            return False

    def ask(
        self,
        place: int,
        question: AgentRequest | RunRequest | QueueRequest,
        expected: type[T],
        timeout_s: float = 60.0,
    ) -> T:
        """Ask an agent as the command line does."""
        return ask_agent(self.state(place), question, expected, timeout_s)

    def type(
        self, place: int, *words: str, folder: Path, timeout: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the command line until it exits, with any exit code."""
        return subprocess.run(
            [sys.executable, "-m", "barnraise.cli.main", *words],
            env=self.environment(place),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def until(self, truth: Callable[[], object], what: str, seconds: float = _PATIENCE_S) -> float:
        """Wait until the condition is true and return the seconds that this took."""

        def checked() -> object:
            time.sleep(0.1)
            return truth()

        return until(checked, seconds, what, self.logs)

    def logs(self) -> str:
        """Return the end of each agent's log."""
        texts = (path.read_text(errors="replace")[-4000:] for path in sorted(self.root.glob("*.log")))
        return "\n---\n".join(texts)


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
