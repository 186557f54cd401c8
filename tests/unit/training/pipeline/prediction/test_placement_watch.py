"""Watch over the placement of a split model."""

from __future__ import annotations

import pytest

from barnraise.planning.split.replica_placement import place_pipelines
from barnraise.planning.split.split_problem import SplitMachine, SplitProblem
from barnraise.planning.split.stage_placement import ModelParts, PartSize
from barnraise.planning.split.stage_time import BlockSpeed, LinkRates
from barnraise.training.pipeline.prediction import placement_watch
from barnraise.training.pipeline.prediction.placement_watch import PlacementWatch

PARTS = ModelParts(PartSize(0), (PartSize(1000),) * 12, PartSize(0), 1000)
LINKS = LinkRates(((1e9, 1e9), (1e9, 1e9)), ((0.0, 0.0), (0.0, 0.0)))


def watch() -> PlacementWatch:
    """Return a watch of two machines that were equally fast at first."""
    machines = tuple(SplitMachine(name, 0, BlockSpeed(0.1, 0.2)) for name in ("mac", "nas"))
    problem = SplitProblem(PARTS, machines, LINKS, 8, PARTS.boundary_bytes)
    made = PlacementWatch()
    made.start(problem, place_pipelines(problem))
    return made


def steps_until_due(made: PlacementWatch, block_s: list[float], steps: int = 100) -> int:
    for step in range(1, steps):
        made.note_step(block_s)
        if made.is_due:
            return step
    return 0


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_watch, "_SHARE", 1e9)


def test_machine_that_has_become_slow_makes_a_new_placement_due() -> None:
    made = watch()
    assert steps_until_due(made, [0.3, 0.3]) == 0
    assert steps_until_due(made, [0.3, 1.2]) > 10
    made.note_step([0.3, 0.3])
    assert made.is_due, "until the blocks are placed again"


def test_unmeasured_machine_keeps_its_speed() -> None:
    assert steps_until_due(watch(), [0.3, 0.0]) == 0


def test_checks_pause_for_a_multiple_of_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_watch, "_SHARE", 1e-9)
    assert steps_until_due(watch(), [0.3, 1.2]) == 0
