"""The record of a session whose workers are killed again and again: each step exactly once, none missing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from barnraise.agent_client.run_requests import RunsRequest, RunsResponse, WatchRequest, WatchResponse
from barnraise.history.columns import unpack_column
from barnraise.history.entries import Entry, StepBatch, ValueBatch
from barnraise.history.log_file import logs_of, read_entries
from barnraise.history.merge import merge
from barnraise.history.view_builder import build_view
from benchmarks.agents.local import LocalAgents

pytestmark = [pytest.mark.slow, pytest.mark.clocks, pytest.mark.timeout(1500)]

STEPS = 400
SCRIPT = """
import os, sys, time
from pathlib import Path
marks = Path(sys.argv[1])
(marks / str(os.getpid())).write_text(os.environ["BARNRAISE_NODE"])
import torch, barnraise
from torch.utils.data import DataLoader, TensorDataset
run = barnraise.init(checkpoint_s=5.0)
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
data = TensorDataset(torch.randn(120, 8), torch.randn(120, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, batches = run.prepare(model, optimizer, DataLoader(data, batch_size=12))
for epoch in run.epochs(int(sys.argv[2]) // 10):
    for batch in batches:
        for x, y in batch:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            run.log(loss=loss)
            optimizer.step()
        if not (marks / "go").exists():
            time.sleep(0.3)
"""


@pytest.fixture(scope="module")
def agents() -> Iterator[LocalAgents]:
    with LocalAgents(3) as formed:
        formed.form()
        yield formed


def _watch(agents: LocalAgents, run: str) -> WatchResponse:
    return agents.ask(0, WatchRequest(run=run, wait_s=0), WatchResponse)


def _victims(marks: Path) -> list[psutil.Process]:
    """Return the workers that are alive, the newest last."""
    alive = []
    for path in marks.glob("[0-9]*"):
        try:
            process = psutil.Process(int(path.name))
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except psutil.Error:
            continue
    return sorted(alive, key=lambda process: process.create_time())


def _kill_one(agents: LocalAgents, run: str, marks: Path, before: int) -> int:
    """Kill the worker that has lived longest, a few steps after the last kill; return the step then.

    It may be the only one: the run then goes back to a checkpoint.
    """

    def is_ready() -> bool:
        row = _watch(agents, run).row
        assert row.phase != "ended", row.sentence
        step = row.progress.step if row.progress is not None else 0
        return step != before and (step >= before + 3 or step < before) and bool(_victims(marks))

    agents.until(is_ready, f"steps are committed after step {before}", 300)
    os.kill(_victims(marks)[0].pid, signal.SIGKILL)
    progress = _watch(agents, run).row.progress
    return progress.step if progress is not None else 0


def _merged(agents: LocalAgents, place: int, run: str) -> tuple[Entry, ...]:
    return merge(read_entries(path) for path in logs_of(agents.state(place), run).values())


def _steps(entries: tuple[Entry, ...]) -> list[int]:
    return [
        step for entry in entries if isinstance(entry, StepBatch) for step in range(entry.first, entry.end)
    ]


def _losses(entries: tuple[Entry, ...]) -> dict[int, float]:
    return {
        entry.first + row: loss
        for entry in entries
        if isinstance(entry, ValueBatch) and "loss" in entry.names
        for row, loss in enumerate(unpack_column(entry.columns[entry.names.index("loss")]))
    }


@pytest.mark.parametrize("kills", [4, 20])
def test_every_step_is_recorded_once_although_writers_are_killed(
    agents: LocalAgents, tmp_path: Path, kills: int
) -> None:
    folder, marks = tmp_path / "project", tmp_path / "marks"
    folder.mkdir()
    marks.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    words = ("run", "--detach", "--env", "agent", "--restarts", "50", "train.py", str(marks), str(STEPS))
    done = agents.type(0, *words, folder=folder)
    assert done.returncode == 0, done.stderr
    run = max(agents.ask(0, RunsRequest(), RunsResponse).runs, key=lambda row: row.at).run
    step = 0
    for _ in range(kills):
        step = _kill_one(agents, run, marks, step)
    (marks / "go").touch()
    agents.until(lambda: _watch(agents, run).row.phase == "ended", "the run has ended")
    row = _watch(agents, run).row
    assert row.code in (0, 3), (row.sentence, row.tail, row.failures)
    agents.until(
        lambda: all(len(_steps(_merged(agents, p, run))) >= STEPS for p in range(3)), "all is copied", 30
    )
    for place in range(3):
        entries = _merged(agents, place, run)
        assert _steps(entries) == list(range(STEPS))
        assert sorted(_losses(entries)) == list(range(STEPS))
        view = build_view(entries, run=run)
        assert (view.missing, view.step, view.state) == (0, STEPS, "ended")
        assert sum(event.kind in ("died", "failure") for event in view.events) > 0
