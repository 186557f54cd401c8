"""Invented machines and runs behind a real page: the invented run, with more machines and runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from barnraise.agent_client.cluster_requests import (
    AgentRequest,
    AgentResponse,
    CheckRequest,
    CheckResponse,
    CheckRow,
    PauseMachineRequest,
    RequestDone,
)
from barnraise.agent_client.history.requests import HistoryRequest
from barnraise.agent_client.run_requests import (
    LogChunk,
    RunRequest,
    RunRow,
    StopRunRequest,
    TrainingProgress,
    WatchRequest,
    WatchResponse,
    WorkerRow,
)
from barnraise.core.errors import RunError
from barnraise.history.entries import Entry, LinkSample, MachineFacts, MachineSample
from barnraise.history.view import RunView
from barnraise.history.view_builder import build_view
from barnraise.page.access.sessions import PageSessions
from barnraise.page.app import PageApp
from barnraise.page.server import PageServer
from benchmarks.invented_run import NAMES, RUN, START, example_run

T = TypeVar("T", bound=AgentResponse)
STEPS_SHOWN = 450
_LINKS = 1000  # of one sample
_SAMPLES = 60  # of one machine
PLACE = "0123456789abcdef"


def invented_nodes(machines: int) -> list[bytes]:
    """Return the machines of the example run, and more."""
    return [*NAMES, *(bytes([0, number]) * 16 for number in range(len(NAMES), machines))]


def invented_entries(machines: int = 3, last: int = STEPS_SHOWN, *, rows: int = 5) -> list[Entry]:
    """Return the entries of the example run with more machines."""
    nodes = invented_nodes(machines)
    extra = nodes[len(NAMES) :]
    entries = example_run(last, rows=rows)
    for number, node in enumerate(extra, len(NAMES)):
        entries.append(MachineFacts(node, f"machine-{number}", "NVIDIA GeForce RTX 3060", 12e9, "Linux 6.8"))
        entries.extend(
            MachineSample(START + 15.0 * count, node, 6e9, 40.0 + count / 4, 150.0, samples_per_s=20.0)
            for count in range(1, _SAMPLES)
        )
    links = [
        (a, b, 100.0 + 13.0 * (place % 70), 0.5 + place % 7)
        for place, (a, b) in enumerate((a, b) for a in nodes for b in nodes if a != b)
        if extra
    ]
    for start in range(0, len(links), _LINKS):
        entries.append(LinkSample(START + 31, tuple(links[start : start + _LINKS])))
    return entries


def invented_rows(count: int) -> list[RunRow]:
    """Return ``count`` runs as `RunsRequest` lists them; the last one is the example."""
    rows = [
        RunRow(
            run=f"train-{number:04d}",
            title="train.py",
            command=("python", "train.py", "--seed", str(number)),
            by="desk",
            at=START - 3600.0 * (count - number),
            phase="ended",
            generation=4,
            version=20,
            sentence="the script ended",
            machines=tuple(NAMES.values()),
            code=0 if number % 7 else 1,
            progress=TrainingProgress(600, 600, "loss", 0.4 + number / 1000, 0.7, 110.0),
        )
        for number in range(count - 1)
    ]
    example = msgspec.structs.replace(
        rows[0],
        run=RUN,
        at=START,
        phase="running",
        sentence="",
        code=None,
        progress=TrainingProgress(STEPS_SHOWN, 600, "loss", 0.58, 0.5, 103.0),
    )
    return [*rows, example]


@dataclass
class InventedMachine:
    """Machine whose answers come from memory; it keeps what it was asked."""

    name: str = "desk"
    machine_id: str = "desk-id"
    rows: Sequence[RunRow] = ()
    entries: Sequence[Entry] = ()
    output: bytes = b"step 1 loss 4.2\nstep 2 loss 4.1\n"
    requests: list[AgentRequest | RunRequest | HistoryRequest] = field(default_factory=list)

    async def runs(self) -> Sequence[RunRow]:
        """Return the rows of all runs."""
        return self.rows

    async def view(self, run: str) -> RunView:
        """Return the state of a run; all runs have the same entries."""
        if run not in {row.run for row in self.rows}:
            raise RunError(f"run {run} is not known here", hint="See the runs: barnraise ps --all")
        return build_view(self.entries, run=run)

    async def ask(self, request: AgentRequest | RunRequest | HistoryRequest, expected: type[T]) -> T:
        """Return an answer, and remember the request."""
        self.requests.append(request)
        answer: AgentResponse
        match request:
            case CheckRequest():
                answer = CheckResponse((CheckRow("quorum", "ok", "3 of 3 voters are online"),))
            case PauseMachineRequest():
                answer = RequestDone("it is paused" if request.paused else "runs may use it again")
            case StopRunRequest():
                answer = RequestDone(f"run {request.run} is stopping")
            case WatchRequest():
                answer = self._watched(request)
            case _:
                raise RunError(f"{type(request).__name__} is not invented")
        assert isinstance(answer, expected)
        return answer

    def _watched(self, request: WatchRequest) -> WatchResponse:
        row = next(row for row in self.rows if row.run == request.run)
        worker = WorkerRow(rank=0, name=self.name, device="cuda:0", state="ended", number=0)
        heard = tuple(
            LogChunk(position.worker, position.offset, self.output[position.offset :], True)
            for position in request.follow
        )
        return WatchResponse(row=row, parts=(), workers=(worker,), heard=heard)


@dataclass
class InventedHost:
    """Agent of one invented machine."""

    machine: InventedMachine
    here: str = PLACE

    def source(self, place: str) -> InventedMachine | None:
        """Return the machine, which has every node id that a run names."""
        return self.machine if place == self.here or len(place) == 2 * 32 else None


class ServedPage(NamedTuple):
    """Page on a port of this process. ``root``: its address before the machine's place."""

    app: PageApp
    root: str

    @property
    def base(self) -> str:
        """Return the address of the machine's pages."""
        return f"{self.root}/{PLACE}"

    def new_link(self, place: str = f"{PLACE}/") -> str:
        """Return a one-time link."""
        return f"{self.root}/open/{self.app.sessions.new_link(place)}"


@contextlib.asynccontextmanager
async def served(machine: InventedMachine) -> AsyncIterator[ServedPage]:
    """Serve a page of an invented machine by the real server."""
    app = PageApp(InventedHost(machine), PageSessions(time.monotonic), "barnraise-test")
    server = PageServer(app)
    await server.start()
    try:
        yield ServedPage(app, f"http://127.0.0.1:{server.port}{app.path}")
    finally:
        await server.stop()
