"""The read model of an invented run says what happened in it."""

from __future__ import annotations

import random

import msgspec
import pytest

from barnraise.history.columns import pack_column
from barnraise.history.entries import (
    TICKS_PER_S,
    Entry,
    GroupStart,
    MachineSample,
    OwnValues,
    PlanAdopted,
    StepBatch,
    ValueBatch,
)
from barnraise.history.view import RunView
from barnraise.history.view_builder import RunHistory, build_view
from benchmarks.invented_run import (
    BATCH,
    DESK,
    MAC,
    NAS,
    RUN,
    START,
    STEPS,
    example_run,
    step_entries,
)


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
    assert view.eta_s == pytest.approx(300 * view.step_s)
    phases = {phase.name: phase for phase in view.phases}
    assert phases["compute"].measured_s == pytest.approx(phases["compute"].predicted_s, rel=0.1)
    assert [machine.share for machine in view.machines][2] == 0.0
    trained = [machine.trained_per_s or 0.0 for machine in view.machines]
    assert sum(trained) == pytest.approx(view.samples_per_s)
    assert view.samples_per_s == pytest.approx(BATCH / (view.step_s or 1))
    assert sum(phase.measured_s or 0 for phase in view.phases) == pytest.approx(view.step_s, rel=1e-3)
    assert sum(machine.share or 0.0 for machine in view.machines) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(6))
def test_history_that_grows_has_the_views_of_one_that_is_read_at_once(seed: int) -> None:
    choices = random.Random(seed)
    logs = {DESK: example_run(600, rows=1), MAC: example_run(560, rows=3), NAS: _with_rollback()}
    shown = dict.fromkeys(logs, 0)
    history = RunHistory(RUN)
    for _ in range(12):
        for node, entries in logs.items():
            if choices.random() < 0.1:
                history.forget(node)
                shown[node] = 0
            count = choices.choice((0, 1, 40, 300))
            history.add(node, entries[shown[node] : shown[node] + count])
            shown[node] = min(len(entries), shown[node] + count)
        at_once = RunHistory(RUN)
        for node, entries in logs.items():
            at_once.add(node, entries[: shown[node]])
        now = START + 1e4
        assert msgspec.json.encode(_unordered(history.view(now))) == msgspec.json.encode(
            _unordered(at_once.view(now))
        )


def test_view_after_new_steps_keeps_what_has_not_changed() -> None:
    entries = example_run(300, rows=1)
    history = RunHistory(RUN)
    history.add(DESK, entries[:-2])
    before = history.view()
    history.add(DESK, entries[-2:])
    after = history.view()
    assert after.step == before.step + 1
    assert after.events is before.events
    assert after.links is before.links
    assert after.checkpoints is before.checkpoints


def test_columns_of_unequal_length_are_shown_as_they_are() -> None:
    odd: list[Entry] = [
        ValueBatch(1, 0, ("a", "b"), (pack_column([1.0, 2.0]), pack_column([3.0]))),
        ValueBatch(1, 2, ("a", "b"), (pack_column([4.0]),)),
        StepBatch(1, 0, START, (10, 10), (1,), ((1,), (2,))),
        StepBatch(1, 2, START + 1, (10,), (1, 2), ((1,), (2,))),
    ]
    view = build_view(odd, run=RUN)
    curve = view.curve("a")
    assert curve is not None
    assert [(point.step, point.value) for point in curve.points] == [(0, 1.0), (1, 2.0), (2, 4.0)]
    assert (view.step, view.samples) == (3, 2)


def _with_rollback() -> list[Entry]:
    """Return a log with steps that do not count, values of one worker, and coarse rows."""
    steps = step_entries(320, rows=7)
    return [
        *steps,
        GroupStart(START + 500, 3, 280, (DESK,), "checkpoint"),
        OwnValues(2, 279, 0, ("loss",), (4.0,), (2.0,)),
        *(StepBatch(3, 280 + 4 * row, START + 600 + row, (400,), (8,), stride=4) for row in range(20)),
        ValueBatch(3, 280, ("loss",), (pack_column([0.5] * 20),), 4),
        MachineSample(START + 700, NAS, temperature_c=50.0),
        MachineSample(START + 650, NAS, temperature_c=40.0, power_w=9.0),
    ]


def _unordered(view: RunView) -> RunView:
    """Return a view without the order in which machines' measurements arrived."""
    links = sorted(view.links, key=lambda link: (link.source_node, link.target_node))
    return msgspec.structs.replace(
        view,
        links=tuple(links),
        samples_of=dict(sorted(view.samples_of.items())),
        curves=tuple(sorted(view.curves, key=lambda curve: curve.name)),
    )


def test_measured_time_of_a_plan_is_the_mean_without_changes_of_machines() -> None:
    first, second = build_view(example_run(), run=RUN).plans
    assert (first.measured_steps, second.measured_steps) == (149, 169)
    entries = [entry for entry in example_run() if isinstance(entry, StepBatch) and 150 <= entry.first < 320]
    ticks = sum(sum(entry.ticks) for entry in entries) - entries[0].ticks[0]
    assert second.measured_step_s == pytest.approx(ticks / TICKS_PER_S / 169)


def test_recent_steps_are_those_of_the_present_machines() -> None:
    view = build_view(example_run(420), run=RUN)
    assert view.recent_steps == 9
    assert view.step_s == pytest.approx(192 / 156 + 0.17, rel=0.1)


def test_death_and_failure_of_its_worker_are_one_event() -> None:
    events = build_view(example_run(360), run=RUN).events
    assert [event.kind for event in events if event.level == "error"] == ["died"]
    died = next(event for event in events if event.kind == "died")
    assert (died.step, died.detail.splitlines()[-1]) == (320, "step 319")
    assert died.detail.startswith("Signal 9 often means")


def test_prediction_of_nothing_is_not_zero() -> None:
    phases = {phase.name: phase for phase in build_view(example_run(300), run=RUN).phases}
    assert phases["data"].predicted_s is None
    assert phases["checkpoint"].predicted_s is None


def test_shares_of_an_ended_run_are_of_all_samples() -> None:
    machines = {machine.name: machine.share or 0.0 for machine in build_view(example_run(), run=RUN).machines}
    assert sum(machines.values()) == pytest.approx(1)
    assert machines["desk"] > machines["mac"] > machines["nas"] > 0
