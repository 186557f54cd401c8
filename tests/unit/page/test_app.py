"""The page over real HTTP: sessions, pages, changes, and hostile names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import quote

import httpx
import msgspec
import pytest

from barnraise.agent_client.cluster_requests import PauseMachineRequest
from barnraise.agent_client.run_requests import StopRunRequest
from barnraise.history.entries import NoteEntry, PlanAdopted, RunStart
from benchmarks.invented_run import DESK, RUN
from benchmarks.page.invented import InventedMachine, ServedPage, invented_entries, invented_rows, served

HOSTILE = "\"'><img src=x onerror=alert(1)><script>alert(2)<\\script>{{7*7}}\u202e\x1b[31m"
Work = Callable[[InventedMachine, ServedPage, httpx.AsyncClient], Awaitable[None]]


@asynccontextmanager
async def opened(machine: InventedMachine) -> AsyncIterator[tuple[ServedPage, httpx.AsyncClient]]:
    """Serve a page and yield it with a client that has used a link."""
    async with served(machine) as page, httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(page.new_link())
        assert answer.status_code == 200
        yield page, client


def run_with(work: Work, machine: InventedMachine | None = None) -> None:
    """Run a test with an open page."""
    chosen = machine or InventedMachine(rows=invented_rows(5), entries=invented_entries())

    async def go() -> None:
        async with opened(chosen) as (page, client):
            await work(chosen, page, client)

    asyncio.run(go())


async def token_of(page: ServedPage, client: httpx.AsyncClient) -> str:
    """Return the token of the session's forms."""
    text = (await client.get(f"{page.base}/")).text
    field = re.search(r'name="token" value="([^"]+)"', text)
    assert field is not None
    return field[1]


def test_pages_show_runs_and_a_run() -> None:
    async def work(machine: InventedMachine, page: ServedPage, client: httpx.AsyncClient) -> None:
        listed = (await client.get(f"{page.base}/")).text
        assert all(row.run in listed for row in machine.rows)
        shown = (await client.get(f"{page.base}/runs/{RUN}")).text
        for words in (
            "2 of 3 machines train",
            "its link slows the others",
            "new plan for desk and mac",
            "NVIDIA",
            "<svg",
        ):
            assert words in shown
        compared = (await client.get(f"{page.base}/compare?run={RUN}&run=train-0001")).text
        assert "lowest loss" in compared
        curves = (await client.get(f"{page.base}/compare/curves?run={RUN}&run=train-0001")).json()
        assert len(curves["runs"]) == 2
        assert "step 1 loss 4.2" in (await client.get(f"{page.base}/logs?run={RUN}&words=LOSS")).text
        assert "3 of 3 voters" in (await client.get(f"{page.base}/doctor")).text
        for file in ("page.css", "page.js", "uPlot.iife.min.js", "uPlot.min.css"):
            assert (await client.get(f"{page.root}/static/{file}")).status_code == 200
        assert (await client.get(f"{page.root}/static/..%2fapp.py")).status_code == 404
        assert (await client.get(f"{page.base}/runs/none")).status_code == 409

    run_with(work)


def test_every_address_needs_the_cookie_and_tells_nothing_without() -> None:
    async def work(machine: InventedMachine, page: ServedPage, client: httpx.AsyncClient) -> None:
        paths = ["/", f"/runs/{RUN}", "/updates", "/logs", "/doctor", "/compare?run=a", "/../static/page.css"]
        async with httpx.AsyncClient(trust_env=False) as other:
            for path in paths:
                answer = await other.get(page.base + path)
                assert answer.status_code == 403
                assert RUN not in answer.text
            assert (await other.get(f"{page.root}/open/guess")).status_code == 403
            origin = page.root.rsplit("/", 1)[0]
            assert (await other.get(origin)).status_code == 403
        assert machine.requests == []

    run_with(work)


def test_link_is_used_once_and_second_use_closes_the_session() -> None:
    async def work(_: InventedMachine, page: ServedPage, client: httpx.AsyncClient) -> None:
        link = page.new_link()
        async with httpx.AsyncClient(trust_env=False) as thief:
            assert (await thief.get(link)).status_code == 200
            assert (await thief.get(f"{page.base}/")).status_code == 200
            assert (await client.get(link)).status_code == 403
            assert (await thief.get(f"{page.base}/")).status_code == 403

    run_with(work)


def test_cookie_is_bound_to_path_and_scripts_cannot_read_it() -> None:
    async def work(_: InventedMachine, page: ServedPage, client: httpx.AsyncClient) -> None:
        answer = await client.get(page.new_link())
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert f"Path={page.app.path}" in cookie
        for header in ("content-security-policy", "referrer-policy", "x-content-type-options"):
            assert header in answer.headers
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["cache-control"] == "no-store"

    run_with(work)


def test_changes_need_token_and_same_origin() -> None:
    async def work(machine: InventedMachine, page: ServedPage, client: httpx.AsyncClient) -> None:
        token = await token_of(page, client)
        origin = page.root.rsplit("/", 1)[0]
        node = DESK.hex()
        stop, pause = f"{page.base}/runs/{RUN}/stop", f"{page.base}/runs/{RUN}/machines/{node}/pause"
        for headers, data in (
            ({"origin": "http://evil.example"}, {"token": token}),
            ({}, {"token": token}),
            ({"origin": origin}, {"token": "wrong"}),
            ({"origin": origin}, {"other": "x"}),
            ({"origin": origin, "sec-fetch-site": "same-site"}, {"token": token}),
        ):
            for address in (stop, pause):
                answer = await client.post(address, headers=headers, data=data)
                assert answer.status_code in (403, 409), (headers, data)
        assert (await client.get(stop)).status_code == 405
        assert machine.requests == []
        assert (await client.post(stop, headers={"origin": origin}, data={"token": token})).status_code == 303
        assert machine.requests == [StopRunRequest(RUN)]
        await client.post(pause, headers={"origin": origin}, data={"token": token})
        request = machine.requests[-1]
        assert request == PauseMachineRequest(machine.machine_id, True)
        nowhere = f"{page.base}/runs/{RUN}/machines/nobody/pause"
        assert (
            await client.post(nowhere, headers={"origin": origin}, data={"token": token})
        ).status_code == 404
        close = await client.post(f"{page.root}/close", headers={"origin": origin}, data={"token": token})
        assert close.status_code == 200
        assert (await client.get(f"{page.base}/")).status_code == 403

    run_with(work)


def test_hostile_names_are_shown_as_text() -> None:
    rows = [
        msgspec.structs.replace(row, run=f"{row.run}{HOSTILE}", by=HOSTILE, sentence=HOSTILE)
        for row in invented_rows(2)
    ]
    entries = [
        *invented_entries(),
        NoteEntry(1.8e9, HOSTILE),
        PlanAdopted(1.8e9, 440, HOSTILE, HOSTILE, HOSTILE),
        RunStart(1.0, HOSTILE, HOSTILE, HOSTILE, ((HOSTILE, HOSTILE),), ((HOSTILE, HOSTILE),)),
    ]
    machine = InventedMachine(name=HOSTILE, rows=rows, entries=entries, output=HOSTILE.encode() + b"\n")

    async def work(_: InventedMachine, page: ServedPage, client: httpx.AsyncClient) -> None:
        run = rows[-1].run
        for path in (
            "/",
            f"/compare?{httpx.QueryParams([('run', row.run) for row in rows])}",
            f"/logs?{httpx.QueryParams(run=run, words=HOSTILE[:5])}",
            "/doctor",
        ):
            text = (await client.get(page.base + path)).text
            _check_harmless(text)
        address = f"{page.base}/runs/{quote(run, safe='')}"
        answer = await client.get(address)
        assert answer.status_code == 200
        _check_harmless(answer.text)

    run_with(work, machine)


def _check_harmless(text: str) -> None:
    assert "<img" not in text
    assert "<script>" not in text
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert "{{7*7}}" in text


def test_updates_send_only_what_has_changed() -> None:
    async def work(machine: InventedMachine, page: ServedPage, client: httpx.AsyncClient) -> None:
        text = (await client.get(f"{page.base}/runs/{RUN}")).text
        address = re.search(r'data-updates="([^"]+)"', text)
        assert address is not None
        origin = page.root.rsplit("/", 1)[0]
        names: list[str] = []
        async with client.stream("GET", origin + address[1], timeout=30.0) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    names.append(msgspec.json.decode(line[6:].encode(), type=tuple[str, str])[0])
                if names == ["fresh", "chart"]:
                    machine.entries = invented_entries(last=460)
                if "state" in names:
                    break
        assert names[:2] == ["fresh", "chart"]
        assert "start" not in names

    run_with(work)


@pytest.mark.parametrize("path", ["/", f"/runs/{RUN}"])
def test_failure_of_the_machine_is_told(path: str) -> None:
    async def work(machine: InventedMachine, page: ServedPage, client: httpx.AsyncClient) -> None:
        machine.rows = ()
        answer = await client.get(page.base + path)
        assert answer.status_code == (200 if path == "/" else 409)

    run_with(work)
