"""The screen of a real run on three agents: a worker is killed, a machine is paused, the run is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
from textual.pilot import Pilot

from barnraise.cli.watch.actions import AgentActions
from barnraise.cli.watch.lines import text_of
from barnraise.cli.watch.page import page_lines
from barnraise.cli.watch.screen import WatchApp
from barnraise.cli.watch.source import RunSource
from benchmarks.agents.local import LocalAgents
from benchmarks.watch.session import row_of, start_session

pytestmark = [pytest.mark.slow, pytest.mark.clocks, pytest.mark.timeout(900)]

_PATIENCE_S = 120.0


@pytest.fixture
def agents() -> Iterator[LocalAgents]:
    with LocalAgents(3) as formed:
        formed.form()
        yield formed


def page(app: WatchApp) -> str:
    """Return the whole page, also what is below the screen."""
    stale = app.freshness.sentence(app.snapshot.view)
    return "\n".join(map(text_of, page_lines(app.snapshot, 200, stale=stale)))


async def until(pilot: Pilot[None], truth: Callable[[], object], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + _PATIENCE_S
    while not truth():
        app = pilot.app
        assert isinstance(app, WatchApp)
        assert asyncio.get_running_loop().time() < deadline, f"not in time: {what}\n{page(app)}"
        await pilot.pause(0.1)


def operate(run: str, steps: Callable[[WatchApp, Pilot[None]], Awaitable[None]]) -> None:
    """Open the screen of a run without a terminal, and operate it."""
    source = RunSource(run)

    async def main() -> None:
        app = WatchApp(source, AgentActions(run), source.look())
        async with app.run_test(size=(80, 24)) as pilot:
            await steps(app, pilot)

    asyncio.run(main())


def kill_worker_of(agents: LocalAgents, marks: Path, place: int) -> None:
    """Kill the newest worker of an agent's machine."""
    agent = agents.agents[place]
    assert agent is not None
    below = {process.pid for process in psutil.Process(agent.pid).children(recursive=True)}
    workers = [int(path.name.removeprefix("pid-")) for path in marks.glob("pid-*")]
    os.kill(max(pid for pid in workers if pid in below), signal.SIGKILL)


def test_screen_follows_a_death_a_pause_and_the_end(
    agents: LocalAgents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in agents.environment(0).items():
        if name.startswith("BARNRAISE_"):
            monkeypatch.setenv(name, value)
    run = start_session(agents, tmp_path, pause_s=0.3, steps=1_000_000)

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "all 3 machines train" in page(app), "three machines train")
        before = app.snapshot.view.step
        kill_worker_of(agents, tmp_path / "marks", 1)
        await until(pilot, lambda: "h1 died" in page(app), "the death is shown")
        assert any(mark.kind == "died" for mark in app.snapshot.view.marks)
        await until(pilot, lambda: "all 3 machines train" in page(app), "the worker is back")
        assert app.snapshot.view.step > before
        await pilot.press("p", "down", "down", "enter")
        await until(pilot, lambda: "h2 is paused: a person at h0 paused it" in page(app), "h2 is paused")
        await until(pilot, lambda: len(row_of(agents, run).machines) == 2, "the others train on")
        await pilot.press("p", "down", "down", "enter")
        await until(pilot, lambda: "all 3 machines train" in page(app), "h2 trains again")
        await pilot.press("s", "y")
        await until(pilot, lambda: app.snapshot.view.state == "stopped", "the run is stopped")
        await pilot.press("q")

    operate(run, steps)
    lines = agents.type(0, "watch", run, folder=tmp_path)
    assert lines.returncode == 0, lines.stderr
    assert "stopped after" in lines.stdout
    assert "h1 died" in lines.stdout
