"""View of a run without a record: state, machines and value of its newest report."""

from __future__ import annotations

import msgspec
import pytest

from barnraise.agent_client.run_requests import WatchResponse
from barnraise.display.row_view import NO_END, run_state, view_of_row, with_end
from barnraise.history.view_builder import build_view
from benchmarks.invented_run import RUN, example_run
from benchmarks.page.invented import STEPS_SHOWN, invented_rows

ROW = invented_rows(2)[-1]


def test_running_machines_train() -> None:
    view = view_of_row(WatchResponse(row=ROW, parts=(), workers=()), None, ROW.at + 60)
    assert {machine.state for machine in view.machines} == {"trains"}
    assert (view.step, view.total_steps, view.elapsed_s) == (STEPS_SHOWN, 600, 60.0)
    assert view.metric == "loss"


@pytest.mark.parametrize(("code", "state"), [(0, "ended"), (1, "failed"), (130, "stopped")])
def test_end_of_a_run(code: int, state: str) -> None:
    assert run_state(msgspec.structs.replace(ROW, phase="ended", code=code)) == state


def test_time_of_an_ended_run_without_a_record_is_not_known() -> None:
    row = msgspec.structs.replace(ROW, phase="ended", code=0)
    assert view_of_row(WatchResponse(row=row, parts=(), workers=()), None, ROW.at + 60).elapsed_s == 0.0


def test_silent_record_of_an_unknown_run_has_ended_with_its_newest_entry() -> None:
    view = build_view(example_run(300), run=RUN)
    assert view.newest_at == view.at
    assert view.started_at is not None
    assert with_end(view, None, view.at + 50) is view
    ended = with_end(view, None, view.at + 3600)
    assert (ended.state, ended.headline, ended.eta_s) == ("stopped", NO_END, None)
    assert (ended.ended_at, ended.elapsed_s) == (view.at, view.at - view.started_at)
    assert {machine.state for machine in ended.machines} == {"ended", "paused"}
    slow = msgspec.structs.replace(view, step_s=600.0)
    assert with_end(slow, None, view.at + 3600) is slow


def test_record_without_an_end_takes_that_of_the_cluster() -> None:
    view = build_view(example_run(300), run=RUN)
    assert with_end(view, ROW, view.at + 3600) is view, "the run goes on"
    row = msgspec.structs.replace(ROW, phase="ended", code=1, sentence="it failed")
    ended = with_end(view, row, view.at + 1)
    assert (ended.state, ended.headline, ended.ended_at) == ("failed", "it failed", view.at)
    finished = build_view(example_run(600), run=RUN)
    assert with_end(finished, None, finished.at + 3600) is finished
