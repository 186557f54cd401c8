"""Plain lines about a run come every few seconds, and only with news."""

from __future__ import annotations

from msgspec.structs import replace

from barnraise.agent_client.run_requests import TrainingProgress
from barnraise.cli.runs.progress.live_line import LiveLines
from barnraise.cli.runs.progress.status_view import OutputBar, StatusView, WaitCadence
from tests.unit.cli.runs.progress.test_waiting_line import response, workers


def test_wait_cadence_is_slower_without_news() -> None:
    now = [0.0]
    cadence = WaitCadence(lambda: now[0])
    printed = []
    for tenth in range(1000):
        now[0] = tenth / 10
        if cadence.is_due("pc is late"):
            printed.append(now[0])
    assert [round(time) for time in printed] == [2, 7, 17, 37, 77]


def test_wait_cadence_with_news_is_five_seconds() -> None:
    now = [0.0]
    cadence = WaitCadence(lambda: now[0])
    printed = []
    for tenth in range(400):
        now[0] = tenth / 10
        if cadence.is_due(f"{tenth} of 400"):
            printed.append(now[0])
    assert [round(time) for time in printed] == [2, 7, 12, 17, 22, 27, 32, 37]


def test_plain_view_prints_nothing_at_once() -> None:
    view = StatusView(live=None)
    own_lines: list[str] = []
    script_lines: list[str] = []
    bar = OutputBar(0, "mac", "cyan", "10%", True)
    view.show(response("running", workers(False, False)), [bar], own_lines.append, script_lines.append)
    assert (own_lines, script_lines) == ([], [])
    assert not view.was_printed(0, "10%")


def test_live_view_draws_bars_above_the_progress() -> None:
    view = StatusView(live=LiveLines())
    now = response("running", workers(True, True))
    now = replace(now, row=replace(now.row, progress=TrainingProgress(5, 64, "loss", 0.5)))
    view.show(now, [OutputBar(0, "mac", "cyan", "x" * 200, True)], print, print)
    assert view.live is not None
    bar, status = view.live.drawn
    assert "xxx" in bar
    assert len(bar) < 100, "it fits the terminal, apart from its colour"
    assert "barnraise: step 5 of 64, loss 0.500, 2 machines" in status


def test_live_view_of_logs_shows_bars_only() -> None:
    view = StatusView(live=LiveLines(), shows_bars_only=True)
    view.show(response("running", workers(True, True)), [], print, print)
    assert view.live is not None
    assert view.live.drawn == ()


def test_plain_view_says_once_that_no_step_comes() -> None:
    view = StatusView(live=None)
    own_lines: list[str] = []
    now = response("running", workers(True, True))
    now = replace(now, row=replace(now.row, progress=TrainingProgress(5, 64, "loss", 0.5, 2.0, 8.0)))
    view.show(now, [], own_lines.append, own_lines.append)
    assert own_lines == []
    view.stepped_at -= 30.0
    view._stall = WaitCadence(iter((0.0, 0.0, 0.0, *[30.0] * 20)).__next__)
    for _ in range(3):
        view.show(now, [], own_lines.append, own_lines.append)
    assert own_lines == ["step 5 of 64, loss 0.500, 8 samples/s, 2 machines, no step for 31 s"]
