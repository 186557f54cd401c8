"""View of a run without a record: state, machines and failures of its newest record."""

from __future__ import annotations

import msgspec
import pytest

from barnraise.agent_client.run_requests import FailureRow, PartRow, WatchResponse, WorkerRow
from barnraise.page.content.row_view import view_of_row
from benchmarks.page.invented import invented_rows

ROW = invented_rows(2)[-1]


def test_preparing_run_names_its_machines_and_what_they_do() -> None:
    row = msgspec.structs.replace(ROW, phase="preparing", progress=None)
    parts = (PartRow(name="mac", stage="building", words="it builds the environment"),)
    view = view_of_row(WatchResponse(row=row, parts=parts, workers=()))
    assert (view.state, view.headline) == ("running", "the run is in the phase preparing")
    assert (view.machines[0].state, view.machines[0].state_reason) == ("joining", "it builds the environment")


def test_running_machines_train() -> None:
    worker = WorkerRow(rank=0, name="mac", device="mps", state="running")
    parts = (PartRow(name="mac", stage="running"),)
    view = view_of_row(WatchResponse(row=ROW, parts=parts, workers=(worker,)))
    assert view.machines[0].state == "trains"
    assert (view.step, view.total_steps) == (450, 600)


@pytest.mark.parametrize(("code", "state"), [(0, "ended"), (3, "ended"), (1, "failed"), (130, "stopped")])
def test_end_of_a_run(code: int, state: str) -> None:
    failure = FailureRow("mac", 0, "it exited with code 1", "tail")
    row = msgspec.structs.replace(ROW, phase="ended", code=code, failures=(failure,))
    view = view_of_row(WatchResponse(row=row, parts=(), workers=()))
    assert view.state == state
    assert view.events[0].detail == "tail"
