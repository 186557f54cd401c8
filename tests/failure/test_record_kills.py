"""The record of a session whose workers are killed again and again: each step exactly once, none missing."""

from __future__ import annotations

import contextlib
import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from barnraise.agent_client.run_requests import RunsRequest, RunsResponse, WatchRequest, WatchResponse
from barnraise.history.columns import unpack_column
from barnraise.history.entries import Entry, FailureNote, GroupStart, StepBatch, ValueBatch
from barnraise.history.log_file import logs_of, read_entries
from barnraise.history.merge import merge
from barnraise.history.view_builder import build_view
from barnraise.runs.record import MAX_RECORDED_FAILURES
from benchmarks.agents.local import LocalAgents

pytestmark = [pytest.mark.slow, pytest.mark.clocks, pytest.mark.timeout(900)]

STEPS = 600
APART = 3  # commits of a worker between two kills
SCRIPT = """
import json, os, sys, time
from pathlib import Path
marks = Path(sys.argv[1])
notes = open(marks / str(os.getpid()), "a", buffering=1)
import torch, barnraise
from torch.utils.data import DataLoader, TensorDataset
run = barnraise.init(checkpoint_s=2.0)
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
data = TensorDataset(torch.randn(120, 8), torch.randn(120, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, batches = run.prepare(model, optimizer, DataLoader(data, batch_size=12))
known = 0
def note(run):
    global known
    means = run.history[-1] if len(run.history) > known else None
    known = len(run.history)
    notes.write(json.dumps([time.time(), run.done - 1, means]) + "\\n")
run.on_commit(note)
for epoch in run.epochs(int(sys.argv[2]) // 10):
    for batch in batches:
        for x, y in batch:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            run.log(loss=loss, start=float(os.environ["BARNRAISE_START"]))
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


def _commits(marks: Path) -> dict[int, list[tuple[float, int, dict[str, float] | None]]]:
    """Return what each worker's script has noted: time, step, and the means of the step before."""
    return {
        int(path.name): [
            json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1:] == "\n"
        ]
        for path in marks.glob("[0-9]*")
    }


def _workers(marks: Path) -> list[psutil.Process]:
    """Return the workers that are alive, the newest last."""
    alive = []
    for path in marks.glob("[0-9]*"):
        try:
            process = psutil.Process(int(path.name))
            if process.status() != psutil.STATUS_ZOMBIE and str(marks) in process.cmdline():
                alive.append(process)
        except psutil.Error:
            continue
    return sorted(alive, key=lambda process: process.create_time())


def _kill(agents: LocalAgents, run: str, marks: Path, *, is_all: bool) -> None:
    """Kill the worker that has trained longest, when two have trained for a while since the last kill.

    ``is_all``: kill all workers, so that the run goes back to a checkpoint.
    """
    since = {pid: len(commits) for pid, commits in _commits(marks).items()}
    training: list[psutil.Process] = []

    def is_ready() -> bool:
        row = _watch(agents, run).row
        assert row.phase != "ended", (row.sentence, row.tail, row.failures)
        commits = _commits(marks)
        training[:] = [
            worker
            for worker in _workers(marks)
            if len(commits.get(worker.pid, [])) >= since.get(worker.pid, 0) + APART
        ]
        return len(training) >= 2

    agents.until(is_ready, "two workers train together")
    for victim in _workers(marks) if is_all else training[:1]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends itself when no state is left
            victim.kill()


def _merged(agents: LocalAgents, place: int, run: str) -> tuple[Entry, ...]:
    return merge(read_entries(path) for path in logs_of(agents.state(place), run).values())


def _steps(entries: tuple[Entry, ...]) -> list[int]:
    return [
        step for entry in entries if isinstance(entry, StepBatch) for step in range(entry.first, entry.end)
    ]


def _values(entries: tuple[Entry, ...], name: str) -> dict[int, float]:
    return {
        entry.first + row: value
        for entry in entries
        if isinstance(entry, ValueBatch) and name in entry.names
        for row, value in enumerate(unpack_column(entry.columns[entry.names.index(name)]))
    }


def _noted_means(marks: Path) -> dict[int, dict[str, float]]:
    """Return the means of each step as the scripts know them; the newest commit of a step counts.

    The last means of a worker do not count: a kill may have come before they left it.
    """
    means: dict[int, dict[str, float]] = {}
    known = [
        (at, step, before if number + 1 < len(commits) else None)
        for commits in _commits(marks).values()
        for number, (at, step, before) in enumerate(commits)
    ]
    for _, step, before in sorted(known, key=lambda commit: commit[0]):
        means.pop(step, None)
        if before is not None:
            means[step - 1] = before
    return means


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
    for number in range(kills):
        _kill(agents, run, marks, is_all=number % 10 == 3)
    (marks / "go").touch()
    agents.until(lambda: _watch(agents, run).row.phase == "ended", "the run has ended")
    row = _watch(agents, run).row
    assert row.code == 0, (row.sentence, row.tail, row.failures)
    assert {failure.signal for failure in row.failures} == {signal.SIGKILL}, row.failures
    agents.until(
        lambda: all(len(_steps(_merged(agents, p, run))) >= STEPS for p in range(3)), "all is copied", 30
    )
    noted = _noted_means(marks)
    assert len(noted) > STEPS // 2
    for place in range(3):
        entries = _merged(agents, place, run)
        assert _steps(entries) == list(range(STEPS))
        for name in ("loss", "start"):
            values = _values(entries, name)
            assert sorted(values) == list(range(STEPS))
            wrong = {
                step: (values[step], means[name])
                for step, means in noted.items()
                if not math.isclose(values[step], means[name], rel_tol=1e-5)
            }
            assert not wrong
        view = build_view(entries, run=run)
        assert (view.missing, view.step, view.state) == (0, STEPS, "ended")
        failures = {
            (entry.node, entry.start) for entry in entries if isinstance(entry, FailureNote) and entry.signal
        }
        assert len(failures) >= min(kills, MAX_RECORDED_FAILURES)
        origins = {entry.origin for entry in entries if isinstance(entry, GroupStart)}
        assert origins == {"start", "kept", "checkpoint"}
