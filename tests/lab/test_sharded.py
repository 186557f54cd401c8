"""The sharded example on three lab hosts, of which one is lost: it goes on from the last whole checkpoint."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine
from lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

_SET = ("--set", "OMP_NUM_THREADS=1")
EVERY = 10  # steps, as the example saves
LAST = 14  # that three take; then the others wait for rank 0 until it is lost
NEXT_STEP = "        loss = model("
HOLD = f"""\
        while (rank, world, step) == (0, 3, {LAST}):
            __import__("time").sleep(0.1)
"""


class Step(NamedTuple):
    number: int
    loss: float
    world: int


def steps(text: str) -> list[Step]:
    matches = re.findall(r"step (\d+): loss (\d+\.\d+) on (\d) ranks", text)
    return [Step(int(number), float(loss), int(world)) for number, loss, world in matches]


@pytest.fixture
def machines() -> Iterator[Machines]:
    with Lab(hosts=3, rate="1gbit") as lab, Machines(lab.hosts) as formed:
        formed.form()
        yield formed


def test_two_go_on_from_what_three_saved(machines: Machines, tmp_path: Path) -> None:
    """The lost one had rank 0, wrote the list of all shards, and coordinated the cluster."""
    text = (REPOSITORY / "examples" / "sharded.py").read_text(encoding="utf-8")
    assert text.count(NEXT_STEP) == 1
    (tmp_path / "sharded.py").write_text(text.replace(NEXT_STEP, HOLD + NEXT_STEP), encoding="utf-8")
    words = ("run", "--on", "h0,h1,h2", *_SET, "sharded.py", "--steps", "25")
    running = CommandLine(machines).start(1, *words, folder=tmp_path)
    machines.until(
        lambda: steps(running.output())[-1:] >= [Step(LAST, 0.0, 0)], 120.0, f"{LAST} steps are done"
    )
    before = steps(running.output())
    assert {step.world for step in before} == {3}
    machines.kill(0)
    machines.hosts[0].kill_all()
    killed = time.monotonic()
    machines.until(lambda: steps(running.output())[-1].world == 2, 90.0, "two go on")
    took = time.monotonic() - killed
    assert running.wait(200) == 0, running.output()
    after = [step for step in steps(running.output()) if step.world == 2]
    saved = after[0].number - 1
    assert saved == EVERY, "the last one that was finished"
    assert [step.number for step in after] == list(range(saved + 1, 26))
    losses = {step.number: step.loss for step in steps(running.output()) if step.world == 3}
    repeated = [step for step in after if step.number in losses]
    assert repeated, "some steps were computed by three and again by two"
    for step in repeated:
        assert step.loss == pytest.approx(losses[step.number], rel=1e-4)
    print(f"from the kill to the first step of the two: {took:.1f} s; {len(repeated)} steps again")
    for place in (1, 2):
        (run,) = (machines.state(place) / "runs").iterdir()
        assert sorted(os.listdir(run / "checkpoints" / "sharded" / "checkpoints")) == [
            "step-00000010",
            "step-00000020",
        ]
    assert not list((tmp_path / "barnraise-runs").glob("*/checkpoints")), "they are no results"
    _check_resumed(CommandLine(machines), run.name, tmp_path)


def _check_resumed(line: CommandLine, run: str, folder: Path) -> None:
    """Another run goes on from the last checkpoint, on all that have parts of it; none is exported."""
    exported = line.run(1, "export", run, str(folder / "out"), folder=folder)
    assert exported.returncode != 0
    assert "has sharded checkpoints only (the newest of step 20, with parts on h" in exported.stderr
    alone = line.run(1, "resume", run, "--on", "h1", *_SET, folder=folder)
    assert "shards of the checkpoint are on h2, which would not take part" in alone.stderr
    resumed = line.run(1, "resume", run, *_SET, folder=folder, timeout=200)
    assert resumed.returncode == 0, resumed.stderr
    assert "from its newest whole sharded checkpoint; parts of step 20 are on h" in resumed.stderr
    assert [step.number for step in steps(resumed.stdout)] == list(range(21, 26)), resumed.stdout
