"""Real agents on the hosts of a lab, driven as the command line drives them."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
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
    StatusRequest,
    StatusResponse,
    decode_response,
    encode,
)
from barnraise.agent_client.queue.requests import QueueRequest
from barnraise.agent_client.run_requests import RunRequest
from barnraise.core.errors import BarnraiseError
from lab import Host, Lab, LabProcess

REPOSITORY = Path(__file__).parents[2]
T = TypeVar("T", bound=AgentResponse)
_START_S = 180.0
_ANSWER_S = 20.0
_PATIENCE = 3.0  # a machine whose cores others use is slow, not wrong


class NotInTimeError(AssertionError):
    """Error of a wait that ended without success."""


class Machines:
    """One agent on each host, with a state directory that outlives the agent."""

    def __init__(self, hosts: Iterable[Host]) -> None:
        self.hosts = list(hosts)
        # A short path: the local socket's name must fit into 107 bytes.
        self._directory = tempfile.TemporaryDirectory(prefix="by-m-")
        self.agents: list[LabProcess | None] = [None] * len(self.hosts)
        self.own: list[dict[str, str]] = [{} for _ in self.hosts]  # for the environment of one host
        self.extra: dict[str, str] = {}  # more for the environment of everything that is started
        self.more_path: tuple[str, ...] = ()  # folders of modules that only what is started now has
        for place in range(len(self.hosts)):
            self.state(place).mkdir(mode=0o700)

    def __enter__(self) -> Machines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for place in range(len(self.hosts)):
            self.kill(place)
        try:
            self._directory.cleanup()
        except OSError:  # a worker outlives its agent by a moment, and writes
            for host in self.hosts:
                host.kill_all()
            self._directory.cleanup()

    def state(self, place: int) -> Path:
        return Path(self._directory.name) / str(place)

    def environment(self, place: int) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")}
        path = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY), *self.more_path])
        own = {"BARNRAISE_STATE_DIRECTORY": str(self.state(place)), "PYTHONPATH": path}
        return {**kept, **own, **self.own[place], **self.extra}

    # the agents

    def launch(self, place: int, *options: str) -> None:
        """Start it, without waiting until it answers."""
        assert self.agents[place] is None
        command = [sys.executable, "-P", "-m", "barnraise.agent", *options]
        self.agents[place] = self.hosts[place].start(command, env=self.environment(place))

    def start(self, place: int, *options: str) -> None:
        self.launch(place, *options)
        self.await_answer(place)

    def await_answer(self, place: int) -> StatusResponse:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                return self.status(place)
            except BarnraiseError:
                if time.monotonic() > deadline:
                    raise AssertionError(f"agent {place} does not start:\n{self.agent_log(place)}") from None
                time.sleep(0.02)

    def process(self, place: int) -> LabProcess:
        process = self.agents[place]
        assert process is not None
        return process

    def kill(self, place: int) -> None:
        """Kill the agent at once, without a goodbye message."""
        process = self.agents[place]
        if process is not None:
            process.signal(signal.SIGCONT)
            process.kill()
            self.agents[place] = None

    def freeze(self, place: int) -> None:
        self.process(place).signal(signal.SIGSTOP)

    def thaw(self, place: int) -> None:
        self.process(place).signal(signal.SIGCONT)

    def agent_log(self, place: int) -> str:
        """Return the log of the agent."""
        process = self.agents[place]
        return process.output() if process is not None else ""

    # what the command line does

    def ask(
        self,
        place: int,
        question: AgentRequest | RunRequest | QueueRequest,
        expected: type[T],
        timeout_s: float = 60.0,
    ) -> T:
        return ask_agent(self.state(place), question, expected, timeout_s)

    def status(self, place: int) -> StatusResponse:
        return self.ask(place, StatusRequest(), StatusResponse, _ANSWER_S)

    def pair(self, owner: int, joiner: int, *, guest: bool = False, at: str = "") -> float:
        """Pair two machines; returns the seconds from the joiner's command to its place in the view."""
        code = self.ask(owner, PairRequest("guest" if guest else "owner"), OfferResponse).code
        begin = time.monotonic()
        self.ask(joiner, JoinClusterRequest(code, at=at), RequestDone, 120.0)
        return time.monotonic() - begin

    def rename(self, place: int, name: str) -> None:
        self.ask(place, RenameRequest(name), RequestDone)

    def form(self) -> list[float]:
        """Start all machines, name them h0, h1, ..., and pair each with the first.

        Return the seconds that each join took.
        """
        for place in range(len(self.hosts)):
            self.launch(place)
        for place in range(len(self.hosts)):
            self.await_answer(place)
            self.rename(place, f"h{place}")
        times = [self.pair(0, place) for place in range(1, len(self.hosts))]
        all_places = range(len(self.hosts))
        self.until(lambda: self.agree(all_places), 60.0, "all agree")
        return times

    def are_links_measured(self, count: int) -> bool:
        """Return True if the first machine knows ``count`` links, each with its rate."""
        links = self.status(0).links
        return len(links) == count and all(link.mbps is not None for link in links)

    def agree(self, places: Iterable[int]) -> bool:
        """Return True if these machines hold the same view, with exactly themselves as members."""
        try:
            statuses = [self.status(place) for place in places]
        except BarnraiseError:
            return False
        firsts = [row.node for status in statuses for row in status.nodes if row.coordinator]
        views = {(status.branch, status.view, first) for status, first in zip(statuses, firsts, strict=False)}
        here = {
            frozenset(row.node for row in status.nodes if row.seniority is not None) for status in statuses
        }
        return (
            len(views) == 1
            and len(here) == 1
            and len(next(iter(here))) == len(statuses)
            and all(status.member and status.decides for status in statuses)
        )

    def until(self, truth: Callable[[], bool], seconds: float, what: str) -> float:
        """Wait until the condition is true and return the seconds that this took."""
        return until(truth, _PATIENCE * seconds, what, self._logs)

    def _logs(self) -> str:
        return "\n".join(f"--- {place}\n{self.agent_log(place)[-3000:]}" for place in range(len(self.hosts)))


def ask_agent(
    state: Path, question: AgentRequest | RunRequest | QueueRequest, expected: type[T], timeout_s: float
) -> T:
    """Ask the agent of a state directory as the command line does."""
    with ListenerClient.connect(state, timeout=_ANSWER_S) as client:
        response = decode_response(client.ask(encode(question), timeout_s))
    assert isinstance(response, expected)
    return response


def until(
    truth: Callable[[], object], seconds: float, what: str, explain: Callable[[], str] = lambda: ""
) -> float:
    """Wait until the condition is true and return the seconds that this took.

    Raise NotInTimeError with an explanation if it does not become true in time.
    """
    begin = time.monotonic()
    while not truth():
        if time.monotonic() > begin + seconds:
            raise NotInTimeError(f"waited {seconds:g} s without success until {what}\n{explain()}")
        time.sleep(0.02)
    return time.monotonic() - begin


def named(status: StatusResponse, name: str) -> str | None:
    """Return the state of a machine as another machine shows it, or None if the machine is not listed."""
    return next((row.state for row in status.nodes if row.name == name), None)


__all__ = ["Lab", "Machines", "named"]
