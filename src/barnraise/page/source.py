"""Requests of the page to a machine: its runs, their records, and requests of the local interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from barnraise.agent_client.cluster_requests import AgentRequest, AgentResponse
from barnraise.agent_client.history.requests import HistoryRequest
from barnraise.agent_client.run_requests import RunRequest, RunRow
from barnraise.history.view import RunView

T = TypeVar("T", bound=AgentResponse)


class PageSource(Protocol):
    """One machine as the page sees it: this one, or another owner's machine."""

    @property
    def name(self) -> str:
        """Return the name of the machine."""

    @property
    def machine_id(self) -> str:
        """Return the id of the machine as commands take it."""

    async def runs(self) -> Sequence[RunRow]:
        """Return the runs that the machine knows, the newest last."""

    async def view(self, run: str) -> RunView:
        """Return the state of a run; raise RunError if the machine does not know it."""

    async def ask(self, request: AgentRequest | RunRequest | HistoryRequest, expected: type[T]) -> T:
        """Return the response of the machine's agent; raise its error if it refuses."""


class PageHost(Protocol):
    """The agent that serves the page."""

    @property
    def here(self) -> str:
        """Return the place of this machine in addresses of the page."""

    def source(self, place: str) -> PageSource | None:
        """Return the machine with this place, or with the beginning of its id; None if there is none."""
