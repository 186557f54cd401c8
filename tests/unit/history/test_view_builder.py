"""The read model of an invented run says what happened in it."""

from __future__ import annotations

import msgspec
import pytest

from barnraise.history.entries import PlanAdopted
from barnraise.history.view_builder import build_view
from tests.unit.history.example_run import BATCH, RUN, STEPS, example_run


def test_ended_run_shows_its_steps_machines_and_events() -> None:
    view = build_view(example_run(), run=RUN)
    assert (view.state, view.step, view.missing, view.rolled_back) == ("ended", STEPS, 0, 0)
    assert view.samples == STEPS * BATCH
    assert view.headline.startswith("finished after 600 steps in ")
    assert [machine.name for machine in view.machines] == ["desk", "mac", "nas"]
    assert [mark.kind for mark in view.marks] == ["plan", "paused", "plan", "died", "recovered"]
    assert [point.step for point in view.curve().points] == list(range(STEPS))  # type: ignore[union-attr]
    assert [checkpoint.machines for checkpoint in view.checkpoints][3] == ("desk", "nas")
    assert len(msgspec.json.encode(view)) > 1000


def test_run_without_a_plan_or_a_step_has_a_view() -> None:
    entries = [entry for entry in example_run(0) if not isinstance(entry, PlanAdopted)]
    view = build_view(entries, run=RUN)
    assert (view.plans, view.curves, view.step_s, view.metric) == ((), (), None, "")
    assert build_view([]).machines == ()


@pytest.mark.parametrize(
    ("last", "headline"),
    [
        (0, "3 machines prepare the first step"),
        (100, "all 3 machines train"),
        (200, "2 of 3 machines train; nas is paused: its link slows the others"),
        (
            360,
            (
                "1 of 3 machines trains; mac has died: its worker was killed by signal 9; "
                "nas is paused: its link slows the others"
            ),
        ),
        (500, "2 of 3 machines train; nas is paused: its link slows the others"),
    ],
)
def test_headline_says_which_machines_train(last: int, headline: str) -> None:
    assert build_view(example_run(last), run=RUN).headline == headline


def test_running_run_shows_predictions_beside_measurements() -> None:
    view = build_view(example_run(300), run=RUN)
    assert view.predicted_step_s is not None
    assert view.step_s is not None
    assert view.step_s == pytest.approx(view.predicted_step_s, rel=0.15)
    assert view.eta_s == pytest.approx(300 * view.step_s, rel=0.1)
    phases = {phase.name: phase for phase in view.phases}
    assert phases["compute"].measured_s == pytest.approx(phases["compute"].predicted_s, rel=0.1)
    assert sum(phase.measured_s or 0 for phase in view.phases) == pytest.approx(view.step_s, rel=0.1)
    assert [machine.share for machine in view.machines][2] == 0.0
    assert sum(machine.share or 0.0 for machine in view.machines) == pytest.approx(1)
