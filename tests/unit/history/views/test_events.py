"""Plans and checkpoints of steps that training has dropped are not the newest ones."""

from __future__ import annotations

from barnraise.history.entries import CheckpointSaved, Entry, GroupStart, PlanAdopted, StepBatch
from barnraise.history.view_builder import RunHistory, build_view
from benchmarks.invented_run import DESK, MAC, RUN


def _plan(at: float, step: int, name: str) -> PlanAdopted:
    return PlanAdopted(at, step, name, "exact gradients", "it is fast", 0.5)


def _steps(generation: int, first: int, count: int) -> StepBatch:
    return StepBatch(generation, first, 100.0 * generation, (10_000,) * count, (4,) * count)


_BEFORE: list[Entry] = [
    GroupStart(100.0, 1, 0, (DESK, MAC)),
    _plan(101.0, 1, "first"),
    CheckpointSaved(131.0, 30, DESK),
    _plan(142.0, 42, "dropped"),
    CheckpointSaved(141.0, 40, DESK),
    CheckpointSaved(151.0, 50, DESK),
    _steps(1, 0, 50),
]
_AFTER: list[Entry] = [
    GroupStart(200.0, 2, 30, (DESK,), "checkpoint"),
    _plan(202.0, 32, "second"),
    CheckpointSaved(211.0, 40, DESK),
    _steps(2, 30, 12),
]


def test_newest_plan_and_checkpoint_are_those_after_a_rollback() -> None:
    before = build_view(_BEFORE, run=RUN)
    assert [plan.name for plan in before.plans] == ["first", "dropped"]
    assert [checkpoint.step for checkpoint in before.checkpoints] == [30, 40, 50]
    view = build_view([*_BEFORE, *_AFTER], run=RUN)
    assert [plan.name for plan in view.plans] == ["first", "second"]
    assert [(checkpoint.step, checkpoint.at) for checkpoint in view.checkpoints] == [(30, 131.0), (40, 211.0)]
    assert view.recent_steps == 10


def test_plan_that_is_reached_again_counts_again() -> None:
    history = RunHistory(RUN)
    history.add(DESK, _BEFORE)
    history.add(MAC, [*_AFTER, _plan(212.0, 42, "dropped"), _steps(2, 42, 3)])
    view = history.view()
    assert [(plan.name, plan.at) for plan in view.plans] == [
        ("first", 101.0),
        ("second", 202.0),
        ("dropped", 212.0),
    ]
