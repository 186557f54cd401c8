"""The page in a real browser: it opens by its link, draws, follows the run, and works by keyboard."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from barnraise.agent_client.cluster_requests import PauseMachineRequest
from barnraise.agent_client.run_requests import StopRunRequest
from barnraise.history.entries import NoteEntry
from benchmarks.invented_run import RUN, START
from benchmarks.page.__main__ import UPDATE_MS, measure_updates
from benchmarks.page.browser import BrowserPage, browser, find_chromium
from benchmarks.page.invented import (
    PLACE,
    InventedMachine,
    ServedPage,
    invented_entries,
    invented_rows,
    served,
)

needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed")
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=2</script>"
Work = Callable[[InventedMachine, ServedPage, BrowserPage], Awaitable[None]]


def with_browser(work: Work, *, runs: int = 5, machines: int = 3) -> None:
    """Run a test in a browser that has opened the page by a one-time link."""
    machine = InventedMachine(rows=invented_rows(runs), entries=invented_entries(machines))

    async def go() -> None:
        async with served(machine) as page, browser() as tab:
            await tab.resize(1200, 900)
            await tab.visit(page.new_link())
            await tab.until(f"location.pathname.endsWith('/{PLACE}/') && document.readyState === 'complete'")
            await work(machine, page, tab)
            origin = page.root.rsplit("/", 1)[0]
            addresses = [address for address in tab.requests if not address.startswith((origin, "data:"))]
            assert addresses in ([], ["about:blank"]), "it asked another host"
            assert tab.problems == []

    asyncio.run(go())


@needs_chromium
def test_link_opens_the_list_and_a_run_with_its_curve() -> None:
    async def work(_: InventedMachine, page: ServedPage, tab: BrowserPage) -> None:
        await tab.evaluate(f"document.getElementById('run-{RUN}').click()")
        await tab.until("document.querySelector('#chart canvas')")
        assert await tab.evaluate("document.querySelectorAll('#marks li').length") >= 5
        assert "2 of 3 machines train" in await tab.evaluate("document.querySelector('#state').innerText")
        names = "[...document.querySelectorAll('#curve-name option')].map(each => each.value).join()"
        assert await tab.evaluate(names) == "loss,lr"
        drawn = """(() => { const each = document.querySelector('#chart canvas');
            const image = each.getContext('2d').getImageData(0, 0, each.width, each.height);
            return image.data.some(value => value) })()"""
        assert await tab.evaluate(drawn), "the chart is empty"

    with_browser(work)


@needs_chromium
def test_page_follows_the_run_and_keeps_the_focus() -> None:
    async def work(machine: InventedMachine, page: ServedPage, tab: BrowserPage) -> None:
        await tab.visit(f"{page.base}/runs/{RUN}")
        await tab.until("document.querySelector('#chart canvas')")
        await tab.evaluate("document.getElementById('stop-summary').focus()")
        await tab.press("Enter", 13)
        await tab.until("document.getElementById('stop-details').open")
        machine.entries = invented_entries(last=470)
        await tab.until("document.getElementById('state').innerText.includes('470 of 600')")
        assert await tab.evaluate("document.activeElement.id") == "stop-summary"
        assert await tab.evaluate("document.getElementById('stop-details').open")
        await tab.press("Tab", 9)
        assert await tab.evaluate("document.activeElement.id") == "stop-button"
        await tab.press("Enter", 13)
        await tab.until("document.readyState === 'complete' && !document.getElementById('stop-details').open")
        assert StopRunRequest(RUN) in machine.requests

    with_browser(work)


@needs_chromium
def test_button_pauses_a_machine() -> None:
    async def work(machine: InventedMachine, page: ServedPage, tab: BrowserPage) -> None:
        await tab.visit(f"{page.base}/runs/{RUN}")
        await tab.evaluate("document.querySelector('[id^=pause-]').click()")
        await tab.until("document.readyState === 'complete'")
        for _ in range(100):
            if any(isinstance(request, PauseMachineRequest) for request in machine.requests):
                return
            await asyncio.sleep(0.05)
        raise AssertionError("no machine was paused")

    with_browser(work)


@needs_chromium
@pytest.mark.parametrize("width", [380, 1200])
@pytest.mark.parametrize("is_dark", [False, True])
def test_pages_fit_the_window_in_light_and_dark(width: int, is_dark: bool) -> None:
    async def work(_: InventedMachine, page: ServedPage, tab: BrowserPage) -> None:
        await tab.resize(width, 800, is_dark=is_dark)
        for path in (
            "/",
            f"/runs/{RUN}",
            f"/compare?run={RUN}&run=train-0001",
            f"/logs?run={RUN}&words=step",
        ):
            await tab.visit(page.base + path)
            assert await tab.evaluate("document.documentElement.scrollWidth") <= width, path
        colour = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
        shade = int(colour.partition("(")[2].partition(",")[0])
        assert (shade < 100) is is_dark

    with_browser(work)


@needs_chromium
def test_hostile_names_run_nothing() -> None:
    async def work(machine: InventedMachine, page: ServedPage, tab: BrowserPage) -> None:
        machine.rows = [msgspec.structs.replace(row, sentence=HOSTILE, by=HOSTILE) for row in machine.rows]
        machine.entries = [*invented_entries(), NoteEntry(START + 1, HOSTILE)]
        await tab.visit(f"{page.base}/")
        await tab.visit(f"{page.base}/runs/{RUN}")
        await tab.until("document.querySelector('#chart canvas')")
        assert "<img" in await tab.evaluate("document.getElementById('events').innerText")
        assert await tab.evaluate("window.hacked === undefined")

    with_browser(work)


@needs_chromium
def test_silent_agent_is_told() -> None:
    machine = InventedMachine(rows=invented_rows(3), entries=invented_entries())

    async def go() -> None:
        async with browser() as tab:
            async with served(machine) as page:
                await tab.visit(page.new_link())
                await tab.until(f"location.pathname.endsWith('/{PLACE}/')")
                await tab.until("document.readyState === 'complete'")
            await tab.until("document.getElementById('news').innerText.includes('does not answer')")

    asyncio.run(go())


def test_update_with_many_machines_is_within_its_limit() -> None:
    costs = sorted(ms for ms, _ in measure_updates(machines=64, count=10))
    assert costs[len(costs) // 2] <= UPDATE_MS
