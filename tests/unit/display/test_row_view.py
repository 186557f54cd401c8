"""View of a run without a record: state, machines and value of its newest report."""

from __future__ import annotations

import msgspec
import pytest

from barnraise.agent_client.run_requests import WatchResponse
from barnraise.display.row_view import run_state, view_of_row
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
