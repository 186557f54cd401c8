"""The keys of the screen, and what it draws when the agent or the run is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from dataclasses import replace as replaced

import pytest
from msgspec.structs import replace
from textual.pilot import Pilot
from textual.widgets import Label, RichLog

from barnraise.cli.watch.dialogs import HelpScreen, LogScreen, MachineScreen, QuestionScreen
from barnraise.cli.watch.screen import PageView, WatchApp
from barnraise.cli.watch.snapshot import Snapshot
from barnraise.core.errors import AgentError, BarnraiseError
from barnraise.history.view_builder import build_view
from benchmarks.invented_run import RUN, example_run

pytestmark = pytest.mark.clocks

_PATIENCE_S = 20.0
Steps = Callable[[WatchApp, Pilot[None]], Awaitable[None]]


@dataclass
class FakeRun:
    """Source and actions of an invented run; notes what it is asked to do."""

    snapshot: Snapshot
    error: str = ""
    looks: int = 0
    done: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=lambda: ["first \x1b[31mred\x1b[0m", "second"])

    def look(self) -> Snapshot:
        self.looks += 1
        if self.error:
            raise AgentError(self.error)
        return self.snapshot

    def stop(self) -> str:
        self.done.append("stop")
        return "the run is stopping"

    def set_pause(self, machine: str, *, paused: bool) -> str:
        self.done.append(f"{'pause' if paused else 'resume'} {machine}")
        if machine == "nas":
            raise BarnraiseError("nas is a guest", hint="Ask its user.")
        return f"{machine} is paused"

    def log_of(self, machine: str) -> FakeRun:
        self.done.append(f"log {machine}")
        return self

    def read(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


def example(step: int = 300, **paused: str) -> FakeRun:
    return FakeRun(Snapshot(build_view(example_run(step), run=RUN), user_pauses=paused))


def operate(run: FakeRun, steps: Steps, *, clock: Callable[[], float] | None = None) -> None:
    """Run the screen without a terminal, and operate it."""

    async def main() -> None:
        options = {} if clock is None else {"clock": clock}
        app = WatchApp(run, run, run.snapshot, **options)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: shown(app) != "")
            await steps(app, pilot)

    asyncio.run(main())


async def until(pilot: Pilot[None], truth: Callable[[], object]) -> None:
    """Wait until the condition is true."""
    deadline = asyncio.get_running_loop().time() + _PATIENCE_S
    while not truth():
        assert asyncio.get_running_loop().time() < deadline, "the screen did not change in time"
        await pilot.pause(0.02)


def shown(app: WatchApp) -> str:
    """Return the lines of the page that are on the screen now."""
    page = app.screen_stack[0].query_one(PageView)
    return "\n".join(page.render_line(row).text.rstrip() for row in range(page.size.height)).strip()


def notices(app: WatchApp) -> list[str]:
    return [notice.message for notice in app._notifications]


def test_page_shows_the_newest_state_of_the_run() -> None:
    run = example(100)

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        assert "all 3 machines train" in shown(app)
        run.snapshot = example(300).snapshot
        await until(pilot, lambda: "step 300 of 600" in shown(app))
        assert "nas is paused" in shown(app)

    operate(run, steps)


def test_stop_asks_first() -> None:
    run = example()

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("s")
        assert isinstance(app.screen, QuestionScreen)
        await pilot.press("enter", "space", "n")
        assert run.done == []
        await pilot.press("s", "y")
        await until(pilot, lambda: notices(app))
        assert (run.done, notices(app)) == (["stop"], ["the run is stopping"])

    operate(run, steps)


def test_run_that_has_ended_cannot_be_stopped() -> None:
    run = example(600)

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("s", "y")
        assert notices(app) == ["The run has ended already."]
        assert run.done == []

    operate(run, steps)


def test_pause_key_pauses_or_resumes_the_chosen_machine() -> None:
    run = example(300, mac="its user paused it")

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("p")
        assert isinstance(app.screen, MachineScreen)
        await pilot.press("escape")
        assert run.done == []
        await pilot.press("p", "enter")
        await pilot.press("p", "down", "enter")
        await pilot.press("p", "down", "down", "enter")
        await until(pilot, lambda: len(notices(app)) == 3)
        assert sorted(run.done) == ["pause desk", "pause nas", "resume mac"]
        assert "Failed: nas is a guest. Ask its user." in notices(app)

    operate(run, steps)


def test_pause_key_resumes_what_it_paused_before_the_cluster_shows_it() -> None:
    run = example(300)

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        for _ in range(3):
            before = len(notices(app))
            await pilot.press("p", "enter")
            await until(pilot, lambda count=before: len(notices(app)) > count)
        assert run.done == ["pause desk", "resume desk", "pause desk"]
        run.snapshot = replaced(run.snapshot, user_pauses={"desk": "a person at mac paused it"})
        await until(pilot, lambda: app.snapshot is run.snapshot)
        await pilot.press("p", "enter")
        await until(pilot, lambda: run.done[-1] == "resume desk")

    operate(run, steps)


def test_log_of_a_machine_opens_and_closes() -> None:
    run = example()

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("l", "down", "enter")
        await until(pilot, lambda: isinstance(app.screen, LogScreen))
        await until(pilot, lambda: len(app.screen.query_one(RichLog).lines) == 2)
        assert [strip.text.rstrip() for strip in app.screen.query_one(RichLog).lines] == [
            "first red",
            "second",
        ]
        await pilot.press("escape")
        assert len(app.screen_stack) == 1
        assert run.done == ["log mac"]

    operate(run, steps)


def test_help_names_every_key() -> None:
    run = example()

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("question_mark")
        assert isinstance(app.screen, HelpScreen)
        text = str(app.screen.query_one(Label).content)
        assert all(f"\n{key} " in f"\n{text}" for key in ("q", "s", "p", "l", "?"))
        await pilot.press("escape", "q")
        assert run.done == []

    operate(run, steps)


def test_silent_agent_and_silent_run_are_not_shown_as_live() -> None:
    run, now = example(), [100.0]

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        assert "NOT LIVE" not in shown(app)
        run.error = "no agent runs on this machine"
        now[0] += 12.0
        await until(pilot, lambda: "NOT LIVE: no agent runs on this machine" in shown(app))
        assert "12 s ago" in shown(app)
        run.error = ""
        await until(pilot, lambda: "NOT LIVE" not in shown(app))
        now[0] += 60.0
        looks = run.looks
        await until(pilot, lambda: run.looks > looks + 1)
        await until(pilot, lambda: "NOT LIVE: nothing came from the run for 1 min 12 s" in shown(app))

    operate(run, steps, clock=lambda: now[0])


def test_nothing_is_drawn_again_without_a_change() -> None:
    run = example(600)  # it has ended, so that the screen asks seldom

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        page = app.screen_stack[0].query_one(PageView)
        drawn: list[object] = []
        page.refresh = lambda *regions, **options: drawn.append(regions)  # type: ignore[assignment,method-assign]
        app._note(Snapshot(run.snapshot.view), "")
        assert drawn == []
        app._note(Snapshot(replace(run.snapshot.view, headline="another")), "")
        assert len(drawn) == 1
        (regions,) = drawn
        assert [region.height for region in regions] == [1]  # type: ignore[attr-defined]

    operate(run, steps)
