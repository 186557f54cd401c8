"""Page service of an agent: serves the page from the first `barnraise open` on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from barnraise.agent.context import AnsweringContext
from barnraise.agent.page.messages import decode
from barnraise.agent.page.owner_requests import OwnerRequests
from barnraise.agent_client.cluster_requests import (
    AgentRequest,
    AgentResponse,
    OpenPageResponse,
    StatusRequest,
    StatusResponse,
    decode_response,
)
from barnraise.agent_client.cluster_requests import encode as encode_request
from barnraise.agent_client.history.requests import HistoryRequest, KeptLog
from barnraise.agent_client.run_requests import (
    RunRequest,
    RunRow,
    RunsRequest,
    RunsResponse,
    WatchRequest,
    WatchResponse,
)
from barnraise.core.errors import AgentError, RunError
from barnraise.display.row_view import view_of_row, with_end
from barnraise.history.view import RunView
from barnraise.identity import NodeId
from barnraise.page.records import RunRecords

if TYPE_CHECKING:
    from barnraise.page.app import PageApp
    from barnraise.page.server import PageServer

T = TypeVar("T", bound=AgentResponse)
_ID_DIGITS = 16  # of a machine, in addresses of the page


class MachineSource:
    """One machine as the page sees it; another one is asked over its link."""

    def __init__(self, context: AnsweringContext, requests: OwnerRequests, node: NodeId) -> None:
        self._context, self._requests, self._node = context, requests, node
        self._records = RunRecords(self)

    @property
    def name(self) -> str:
        """Return the name of the machine."""
        return self._context.name_of(self._node)

    @property
    def machine_id(self) -> str:
        """Return the id of the machine as commands take it."""
        return str(self._node)

    async def runs(self) -> Sequence[RunRow]:
        """Return the runs that the machine knows or has a record of, the newest last."""
        rows = (await self.ask(RunsRequest(), RunsResponse)).runs
        known = {row.run for row in rows}
        recorded = [_row_of_log(log) for log in await self._records.listed() if log.run not in known]
        return sorted([*rows, *recorded], key=lambda row: row.at)

    async def view(self, run: str) -> RunView:
        """Return the state of a run; raise RunError if the machine does not know it."""
        view = await self._records.view(run)
        if view is not None and view.state != "running":
            return view
        try:
            response = await self.ask(WatchRequest(run=run, wait_s=0.0), WatchResponse)
        except RunError:
            if view is None:
                raise
            return with_end(view, None, time.time())  # only its record is left
        if view is None:
            return view_of_row(response, await self.ask(StatusRequest(), StatusResponse), time.time())
        return with_end(view, response.row, time.time())

    async def ask(self, request: AgentRequest | RunRequest | HistoryRequest, expected: type[T]) -> T:
        """Return the response of the machine's agent; raise its error if it refuses."""
        if self._node == self._context.me:
            answer = decode_response(await self._context.answer(encode_request(request), ""))
        else:
            answer = await self._requests.ask(self._node, request)
        if not isinstance(answer, expected):
            raise AgentError(f"{self.name} answered {type(answer).__name__} to a {type(request).__name__}")
        return answer


class _OpenPage(NamedTuple):
    """The page while it is served."""

    app: PageApp
    server: PageServer


class PageService:
    """The page of one agent, and the requests of other owners' pages. Nothing listens before `open`."""

    def __init__(self, context: AnsweringContext) -> None:
        self._context = context
        self.requests = OwnerRequests(context)
        self._page: _OpenPage | None = None
        self._sources: dict[NodeId, MachineSource] = {}
        self._starting = asyncio.Lock()

    @property
    def here(self) -> str:
        """Return the place of this machine in addresses of the page."""
        return self._place(self._context.me)

    def source(self, place: str) -> MachineSource | None:
        """Return the machine with this place, or whose id this is; None if there is none."""
        wanted = place.lower()
        for node in self._context.log.members:
            if wanted in (self._place(node), node.raw.hex()):
                return self._sources.setdefault(node, MachineSource(self._context, self.requests, node))
        return None

    async def open(self, machine: str) -> OpenPageResponse:
        """Return a one-time link to the page of a machine; empty: this one. Start to serve if necessary."""
        node = self._context.find(machine) if machine else self._context.me
        if node != self._context.me:  # a refusal is told here, and not in the browser
            await MachineSource(self._context, self.requests, node).ask(StatusRequest(), StatusResponse)
        async with self._starting:
            if self._page is None:
                self._page = await self._start()
        page = self._page
        key = page.app.sessions.new_link(f"{self._place(node)}/")
        link = f"http://127.0.0.1:{page.server.port}{page.app.path}/open/{key}"
        self._context.audit.write("page-opened", by="this machine's user", detail=self._context.name_of(node))
        return OpenPageResponse(link, self._context.name_of(node))

    def received(self, node: NodeId, body: memoryview) -> None:
        """Handle a message of another owner's agent."""
        self.requests.received(node, decode(body))

    async def stop(self) -> None:
        """Close the page and all its connections."""
        if self._page is not None:
            await self._page.server.stop()
            self._page = None

    async def _start(self) -> _OpenPage:
        # The web server is loaded only where a page is opened.
        from barnraise.page.access.sessions import PageSessions
        from barnraise.page.app import PageApp
        from barnraise.page.server import PageServer

        sessions = PageSessions(asyncio.get_running_loop().time)
        app = PageApp(self, sessions, f"barnraise-{self._context.me.short}")
        server = PageServer(app, self._context.settings.page.port)
        await server.start()
        return _OpenPage(app, server)

    @staticmethod
    def _place(node: NodeId) -> str:
        return node.raw.hex()[:_ID_DIGITS]


def _row_of_log(log: KeptLog) -> RunRow:
    """Return the line of a run of which only the record is left."""
    return RunRow(
        run=log.run,
        title="",
        command=(),
        by="",
        at=log.changed_at,
        phase="recorded",
        generation=0,
        version=0,
        sentence="only its record is kept",
        machines=(),
    )
