"""A training whose machines are all gone goes on from a copy on a machine that had no part in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from barnraise.agent_client.run_requests import RunsRequest, RunsResponse
from barnraise.checkpoint import AgentCheckpointSigner, Checkpoints, digest
from barnraise.runs.checkpoint_manifest import folder_step
from benchmarks.agents.commits import read_commits
from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine
from lab import Lab
from tests.lab.test_session import alone, check_equal, finals, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Lab(hosts=3) as lab, Machines(lab.hosts) as formed:
        formed.form()
        yield formed


def kept(machines: Machines, place: int, run: str) -> set[int]:
    folder = machines.state(place) / "runs" / run / "checkpoints"
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return {step for name in names if (step := folder_step(name)) is not None}


def test_third_machine_continues_alone_from_its_copy(machines: Machines, tmp_path: Path) -> None:
    line, trace, hold = CommandLine(machines), tmp_path / "trace", tmp_path / "hold"
    hold.touch()
    options = {"MODEL": "images", "EPOCHS": "9"}
    more = {"HOLD": str(hold), "HOLD_S": "0.5", "CHECKPOINT_S": "0.5", "COPIES": "3"}
    start(line, tmp_path / "project", trace, "h0,h1", **options, **more)
    machines.until(lambda: bool(machines.ask(2, RunsRequest(), RunsResponse).runs), 90.0, "it is known")
    run = machines.ask(2, RunsRequest(), RunsResponse).runs[-1].run
    machines.until(lambda: bool(kept(machines, 2, run)), 60.0, "the third has a copy")
    for place in range(3):
        machines.hosts[place].kill_all()
        machines.agents[place] = None
    hold.unlink()
    before = read_commits(trace)
    machines.start(2)

    notary = AgentCheckpointSigner(machines.state(2), run)
    newest = Checkpoints(machines.state(2) / "runs" / run / "checkpoints", run, notary).newest()
    assert newest is not None
    manifest, parts = newest
    assert digest(parts).hex() == manifest.digest
    assert {manifest.digest} == {commit.digest for commit in before if commit.step == manifest.step}

    assert line.run(2, "continue", "--without", "h0", "--without", "h1").returncode == 0
    assert line.run(2, "stop", run).returncode == 0
    machines.until(
        lambda: machines.ask(2, RunsRequest(), RunsResponse).runs[-1].phase == "ended", 90.0, "it has ended"
    )
    exported = line.run(2, "export", run, str(tmp_path / "out"), folder=tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert json.loads((tmp_path / "out" / "run.json").read_text())["steps"] == manifest.step

    resumed = line.run(2, "resume", run, folder=tmp_path, timeout=200)
    assert resumed.returncode == 0, resumed.stderr
    assert f"from step {manifest.step}, which is on h2" in resumed.stderr
    words = rf"resuming from the checkpoint of step {manifest.step} of run {run}"
    assert re.search(words, resumed.stdout + resumed.stderr)
    after = read_commits(trace)[len(before) :]
    assert [commit.step for commit in after[:3]] == [manifest.step + 1 + place for place in range(3)]
    check_equal(finals(resumed.stdout), alone(**options))
