"""ASGI application of the page: checks each request and its session, then shows a page or makes a change."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

from markupsafe import Markup
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from barnraise.agent_client.cluster_requests import (
    CheckRequest,
    CheckResponse,
    PauseMachineRequest,
    RequestDone,
)
from barnraise.agent_client.run_requests import StopRunRequest
from barnraise.core.errors import BarnraiseError, ProtocolError
from barnraise.display.charts.theme import CHART_STYLE
from barnraise.display.comparison import differing, facts_of
from barnraise.page.access.guard import MOST_BODY, SECURITY_HEADERS, RequestRefusal, refuse_request
from barnraise.page.access.sessions import LONGEST_S, PageSessions, is_same
from barnraise.page.content.chart_data import common_metric, comparison_data
from barnraise.page.content.log_search import search_logs
from barnraise.page.render import RunParts, render
from barnraise.page.source import PageHost, PageSource
from barnraise.page.updates import MOST_STREAMS, Build, PageUpdates, Parts, digest_of

_STATIC = Path(__file__).parent / "static"
_FILES = {
    "page.css": (_STATIC / "page.css", "text/css"),
    "page.js": (_STATIC / "page.js", "text/javascript"),
    "uPlot.min.css": (_STATIC / "uplot" / "uPlot.min.css", "text/css"),
    "uPlot.iife.min.js": (_STATIC / "uplot" / "uPlot.iife.min.js", "text/javascript"),
}
_OPEN_HINT = "Open the page with: barnraise open"
_MOST_ROWS = 500
_MOST_COMPARED = 8
_MOST_MADE = 8  # pages of runs whose parts stay in memory
_BODY_S = 10.0


class PageApp:
    """The page of one agent. ``path``: secret first part of all addresses, so that no other port learns the
    cookie, which browsers send to every port of this machine.
    """

    def __init__(self, host: PageHost, sessions: PageSessions, cookie: str) -> None:
        self._host, self.sessions, self._cookie = host, sessions, cookie
        self._updates = PageUpdates()
        self._made: dict[tuple[str, str], RunParts] = {}
        self.path = f"/{secrets.token_urlsafe(16)}"
        routes = [
            Route("/open/{key}", self._open),
            Route("/close", self._close, methods=["POST"]),
            Route("/static/{file}", self._static),
            Route("/{place}/", self._runs),
            Route("/{place}/updates", self._stream),
            Route("/{place}/compare", self._compare),
            Route("/{place}/compare/curves", self._curves),
            Route("/{place}/logs", self._logs),
            Route("/{place}/doctor", self._doctor),
            Route("/{place}/runs/{run}", self._run),
            Route("/{place}/runs/{run}/updates", self._stream),
            Route("/{place}/runs/{run}/stop", self._stop, methods=["POST"]),
            Route("/{place}/runs/{run}/machines/{node}/{change}", self._limit, methods=["POST"]),
        ]
        self._routes = Starlette(
            routes=[_below(self.path, route) for route in routes],
            exception_handlers={404: self._missing, BarnraiseError: self._failed},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request before anything else sees it; add the headers for browsers to every answer."""
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refuse(scope)
        app: ASGIApp = self._routes if refusal is None else _refused(refusal)
        await app(scope, receive, send_guarded)

    def _refuse(self, scope: Scope) -> RequestRefusal | None:
        headers, path = Headers(scope=scope), str(scope["path"])
        opens = path.startswith(f"{self.path}/open/")
        target_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        refusal = refuse_request(scope["method"], target_bytes, headers, opens=opens)
        if refusal is not None or opens:
            return refusal
        token = self.sessions.token_of(Request(scope).cookies.get(self._cookie, ""))
        if token is None or not path.startswith(f"{self.path}/"):
            return RequestRefusal(403, "This page is open to its owner only.")
        scope["state"] = {"token": token}
        return None

    # sessions

    async def _open(self, request: Request) -> Response:
        opened = self.sessions.redeem(request.path_params["key"]) if request.method == "GET" else None
        if opened is None:
            return _message(403, "This link is not valid: it was used before, or it is too old.", _OPEN_HINT)
        # Not a redirect: the browser would leave the cookie out if another page led to this link.
        answer = _message(200, "Opening the page.", target=f"{self.path}/{opened.place}")
        answer.set_cookie(
            self._cookie,
            opened.cookie,
            path=self.path,
            httponly=True,
            samesite="strict",
            max_age=int(LONGEST_S),
        )
        return answer

    async def _close(self, request: Request) -> Response:
        await self._form(request)
        self.sessions.close(request.cookies.get(self._cookie, ""))
        return _message(200, "The session is closed.", _OPEN_HINT)

    async def _form(self, request: Request) -> Mapping[str, str]:
        """Return the fields of a form; raise ProtocolError without the session's token."""
        body = b""
        try:
            async with asyncio.timeout(_BODY_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MOST_BODY:
                        raise ProtocolError("the form is too large")
        except TimeoutError as error:
            raise ProtocolError("the form did not arrive in time") from error
        fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=16)
        form = {name: values[-1] for name, values in fields.items()}
        if not is_same(form.get("token", ""), request.state.token):
            raise ProtocolError("the form is not of this session", hint="Load the page again.")
        return form

    # pages

    async def _static(self, request: Request) -> Response:
        if request.path_params["file"] == "charts.css":
            return Response(CHART_STYLE, media_type="text/css")
        path, kind = _FILES.get(request.path_params["file"], (None, ""))
        if path is None:
            return await self._missing(request, None)
        return FileResponse(path, media_type=kind, content_disposition_type="inline")

    async def _runs(self, request: Request) -> Response:
        return await self._live_page(request, "runs.html", page="runs")

    async def _run(self, request: Request) -> Response:
        return await self._live_page(request, "run.html", page="run", run=request.path_params["run"])

    async def _live_page(self, request: Request, template: str, **values: Any) -> Response:
        """Return a page whose parts are updated later."""
        source = self._source(request)
        parts = await self._updates.parts(request.url.path.rstrip("/"), self._parts(request, source))
        shown = {name: Markup(html) for name, html in parts.items()}  # noqa: S704  # rendered and escaped
        known = digest_of(parts)
        return self._page(template, request, source, parts=shown, known=known, **values)

    def _parts(self, request: Request, source: PageSource) -> Build:
        """Return what makes the parts of a run's page, or of the list of runs."""
        base, run = self._base(request), request.path_params.get("run")

        async def build() -> Parts:
            if run is not None:
                view = await source.view(run)
                return await asyncio.to_thread(self._run_parts(base, run).render, view)
            rows = (await source.runs())[-_MOST_ROWS:][::-1]
            return {"runs": await asyncio.to_thread(render, "sections/runs.html", rows=rows, base=base)}

        return build

    def _run_parts(self, base: str, run: str) -> RunParts:
        """Return the parts of a run's page that were made before."""
        parts = self._made.pop((base, run), None) or RunParts(base)
        self._made[base, run] = parts  # the newest use is last
        while len(self._made) > _MOST_MADE:
            del self._made[next(iter(self._made))]
        return parts

    async def _stream(self, request: Request) -> Response:
        """Return the updates of a page as server-sent events."""
        if self._updates.streams >= MOST_STREAMS:
            return _message(503, "Too many pages are open at once.", "Close some of them.")
        cookie = request.cookies.get(self._cookie, "")

        def is_open() -> bool:
            return self.sessions.token_of(cookie) is not None

        events = self._updates.stream(
            request.url.path.removesuffix("updates").rstrip("/"),
            self._parts(request, self._source(request)),
            is_open,
            request.query_params.get("known", ""),
        )
        return StreamingResponse(events, media_type="text/event-stream")

    async def _compare(self, request: Request) -> Response:
        source = self._source(request)
        runs = request.query_params.getlist("run")[:_MOST_COMPARED]
        views = [await source.view(run) for run in runs]
        facts = [facts_of(view) for view in views]
        return self._page(
            "compare.html",
            request,
            source,
            page="compare",
            views=views,
            names=list(dict.fromkeys(name for fact in facts for name in fact)),
            facts=facts,
            differing=differing(facts),
            metric=common_metric(views),
            query=urlencode([("run", run) for run in runs]),
        )

    async def _curves(self, request: Request) -> Response:
        source = self._source(request)
        views = [await source.view(run) for run in request.query_params.getlist("run")[:_MOST_COMPARED]]
        return Response(comparison_data(views, common_metric(views)), media_type="application/json")

    async def _logs(self, request: Request) -> Response:
        source = self._source(request)
        rows = (await source.runs())[-_MOST_ROWS:][::-1]
        words = request.query_params.get("words")
        run = request.query_params.get("run") or (rows[0].run if rows else "")
        log_lines = await search_logs(source, run, words[:200]) if words is not None and run else None
        return self._page(
            "logs.html", request, source, page="logs", rows=rows, run=run, words=words or "", found=log_lines
        )

    async def _doctor(self, request: Request) -> Response:
        source = self._source(request)
        checks = sorted(
            (await source.ask(CheckRequest(), CheckResponse)).rows, key=lambda row: _WORST.index(row.state)
        )
        return self._page("doctor.html", request, source, page="doctor", checks=checks)

    # changes

    async def _stop(self, request: Request) -> Response:
        await self._form(request)
        run = request.path_params["run"]
        await self._source(request).ask(StopRunRequest(run), RequestDone)
        return RedirectResponse(f"{self._base(request)}/runs/{run}", status_code=303)

    async def _limit(self, request: Request) -> Response:
        """Pause or resume a machine, as the commands of this machine do."""
        await self._form(request)
        run, node, change = (request.path_params[name] for name in ("run", "node", "change"))
        here, machine = self._host.source(self._host.here), self._host.source(node)
        if here is None or machine is None or change not in ("pause", "resume"):
            return await self._missing(request, None)
        await here.ask(PauseMachineRequest(machine.machine_id, change == "pause"), RequestDone)
        return RedirectResponse(f"{self._base(request)}/runs/{run}", status_code=303)

    # parts

    def _source(self, request: Request) -> PageSource:
        source = self._host.source(request.path_params["place"])
        if source is None:
            raise ProtocolError("there is no such machine", hint="See the machines: barnraise nodes")
        return source

    def _base(self, request: Request) -> str:
        return f"{self.path}/{request.path_params['place']}"

    def _page(
        self, template: str, request: Request, source: PageSource, *, status: int = 200, **values: Any
    ) -> HTMLResponse:
        html = render(
            template,
            root=self.path,
            base=self._base(request),
            machine=source.name,
            token=request.state.token,
            **values,
        )
        return HTMLResponse(html, status_code=status)

    async def _missing(self, request: Request, _error: Exception | None) -> Response:
        return _message(404, "There is no such page.", _OPEN_HINT)

    async def _failed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, BarnraiseError)
        return _message(409, error.message, error.hint)


_WORST = ("fail", "warn", "ok")


def _below(path: str, route: Route) -> Route:
    return Route(path + route.path, route.endpoint, methods=list(route.methods or ()))


def _refused(refusal: RequestRefusal) -> Response:
    answer = _message(refusal.status, refusal.sentence, _OPEN_HINT)
    answer.headers["connection"] = "close"
    return answer


def _message(status: int, sentence: str, hint: str = "", target: str = "") -> HTMLResponse:
    html = render("message.html", sentence=sentence, hint=hint, target=target)
    return HTMLResponse(html, status_code=status)
