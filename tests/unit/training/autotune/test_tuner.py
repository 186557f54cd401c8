"""Tuner of the synchronization: its choices for given clusters, and the commits at which it plans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from barnraise.core.errors import RunError
from barnraise.planning import (
    Calibration,
    Level,
    Levels,
    ModelSize,
    PlanCluster,
    PlanLimits,
    StepTimes,
    make_plans,
)
from barnraise.topology.graph import TopologyGraph
from barnraise.training.autotune import tuner
from barnraise.training.autotune.tuner import (
    WARM,
    GroupSample,
    SyncTuner,
    _keep_unless_better,
    choose,
    sync_of,
)
from barnraise.training.sync import Sync
from tests.unit.planning.clusters import mesh

MODEL = ModelSize(parameters=20_000_000)
PROFILE = StepTimes(batch=32, unit=2)
SPEEDS = [8.0] * 4


def test_fast_links_stay_exact_without_advice() -> None:
    choice = choose(mesh(SPEEDS, 10_000.0), MODEL, PROFILE, "auto", Calibration())
    assert choice.sync == Sync()
    assert choice.advice == ""


def test_group_slower_than_one_machine_gets_advice() -> None:
    choice = choose(mesh([8.0, 9.0], 20.0), MODEL, PROFILE, "exact", Calibration())
    assert choice.sync == Sync(), "the mathematics changes with the user's word only"
    assert choice.advice.startswith("m01 alone would be ")
    assert "barnraise run --on m01" in choice.advice
    assert "--sync auto" in choice.advice


@pytest.mark.parametrize("overlaps", [True, False])
def test_machine_too_slow_for_microbatch_keeps_exact_steps(overlaps: bool) -> None:
    """A machine without micro-batches still takes part in the all-reduce; no local steps were requested."""
    cluster, profile = mesh([300.0, 500.0, 10.0], 50.0), StepTimes(batch=24, unit=3)
    small = ModelSize(parameters=478, wire_bytes=8.0)
    options = PlanLimits(is_given=True, is_flat=True, overlaps=overlaps)
    ranking = make_plans(cluster, small, profile, options)
    assert (ranking.chosen.kind, ranking.chosen.codec, len(ranking.chosen.order)) == (
        "every_step",
        "exact",
        3,
    )
    assert [part.samples for part in ranking.chosen.parts if part.name == "m02"] == [0]
    taken = choose(cluster, small, profile, "exact", Calibration(), overlaps=overlaps)
    assert taken.sync == Sync()
    large = choose(cluster, MODEL, profile, "exact", Calibration(), overlaps=overlaps)
    assert large.advice.startswith("m01 alone would be"), (
        "also with a machine that only takes part in the all-reduce"
    )
    slow = choose(
        cluster, small, profile, "exact", Calibration(), (ranking.chosen, 10 * ranking.chosen.step_s)
    )
    assert slow.calibration.compute == 1.0, "what the group waits for is not its computing"


def test_workers_on_one_machine_have_plan() -> None:
    choice = choose(mesh([8.0], 940.0), MODEL, PROFILE, "auto", Calibration(), workers=2)
    assert (choice.plan.kind, choice.sync, choice.advice) == ("alone", Sync(), "")


def test_given_group_ignores_memory_limits() -> None:
    small = msgspec.structs.replace(mesh([8.0, 8.0], 10_000.0).members[1], memory_bytes=1 << 20)
    cluster = mesh([8.0, 8.0], 10_000.0)
    cluster = msgspec.structs.replace(cluster, members=(cluster.members[0], small))
    choice = choose(cluster, MODEL, PROFILE, "auto", Calibration())
    assert len(choice.plan.order) == 2


def test_machine_with_slow_link_is_named() -> None:
    cluster = mesh(SPEEDS, lambda a, b: 10.0 if b == 3 else 2500.0)
    choice = choose(cluster, MODEL, PROFILE, "exact", Calibration())
    assert len(choice.plan.order) == 4, "a group changes by the user's word"
    assert "barnraise run --on m00,m01,m02" in choice.advice


def lone_line(mbps: float, speeds: Sequence[float] = SPEEDS) -> PlanCluster:
    """Return a cluster in which only the last machine has a slow link."""
    last = len(speeds) - 1
    cluster = mesh(list(speeds), lambda a, b: mbps if last in (a, b) else 2500.0)
    members = tuple(
        msgspec.structs.replace(machine, node=machine.name.encode().hex()) for machine in cluster.members
    )
    return msgspec.structs.replace(cluster, members=members)


def test_machine_with_slow_link_is_paused_in_auto_mode() -> None:
    choice = choose(lone_line(1.0), MODEL, PROFILE, "auto", Calibration())
    assert choice.paused == (b"m03".hex(),)
    assert choice.pause_reason.startswith("m00, m01 and m02 are predicted to be ")
    assert choice.pause_reason.endswith("times as fast without it")
    assert not choose(lone_line(1.0), MODEL, PROFILE, "exact", Calibration()).paused
    assert not choose(lone_line(2500.0), MODEL, PROFILE, "auto", Calibration()).paused


def test_pausing_keeps_two_machines() -> None:
    """One machine alone would be fastest, but its commits would have no other holder."""
    lonely = mesh([100.0, 8.0, 8.0], 1.0)
    best = make_plans(lonely, MODEL, PROFILE, PlanLimits(sync="auto")).chosen
    assert len(best.order) == 1
    assert len(choose(lonely, MODEL, PROFILE, "auto", Calibration()).paused) <= 1
    assert not choose(lone_line(0.1, [8.0, 8.0]), MODEL, PROFILE, "auto", Calibration()).paused


def test_pause_is_requested_for_observed_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 20.0)
    monkeypatch.setattr(tuner, "cluster_of_group", lambda *_: lone_line(1.0))
    monkeypatch.setattr(tuner, "measure_codecs", lambda codecs: codecs)
    exact = make_plans(lone_line(1.0), MODEL, PROFILE, PlanLimits(is_given=True, is_flat=True)).chosen
    watched.commit(3, step_s=exact.step_s)
    assert [rested[0] for rested in watched.rested] == [b"m03".hex()]
    assert not watched.requested_sync, "the remaining workers choose after the pause"


def test_fixed_levels_are_respected() -> None:
    cluster = mesh(SPEEDS, 200.0)
    rounds = Levels(inside=Level(codec="bf16", period=6))
    choice = choose(cluster, MODEL, PROFILE, "auto", Calibration(), levels=rounds)
    assert (choice.sync.period, choice.sync.codec) == (6, "bf16")
    star = Levels(inside=Level(all_reduce="star"))
    fixed = choose(cluster, MODEL, PROFILE, "exact", Calibration(), levels=star)
    free = choose(cluster, MODEL, PROFILE, "exact", Calibration())
    assert fixed.sync == free.sync == Sync()
    assert fixed.plan.step_s > 1.2 * free.plan.step_s, "it is predicted as it will be"


def two_places(a: int, b: int) -> float:
    return 940.0 if (a < 2) == (b < 2) else 20.0


def test_plans_use_strategies_of_session() -> None:
    """Plans are flat if the levels are fixed without sites; compressed all-reduce goes through sites."""
    cluster = mesh(SPEEDS, two_places)

    def ways(levels: Levels, *, exact: bool) -> set[str]:
        options = PlanLimits(sync="auto", is_given=True, is_flat=True, levels=levels)
        plans = make_plans(cluster, MODEL, PROFILE, options).plans
        return {plan.way for plan in plans if len(plan.order) == 4 and (plan.codec == "exact") == exact}

    assert "sites" in ways(Levels(), exact=True)
    assert ways(Levels(), exact=False) == {"sites"}
    ring = Levels(inside=Level(all_reduce="ring"))
    assert ways(ring, exact=True) == {"ring"}
    assert ways(ring, exact=False) == {"sites"}
    rounds = Levels(across=Level(codec="int8", period=8))
    assert ways(rounds.exact(), exact=True) == {"sites"}, "as its first steps are summed"
    choice = choose(cluster, MODEL, PROFILE, "auto", Calibration(), levels=rounds)
    assert (choice.sync.period, choice.sync.codec) == (8, "int8")


def test_levels_that_fit_no_plan_are_reported() -> None:
    impossible = Levels(inside=Level(codec="powersgd"))
    choice = choose(mesh(SPEEDS, 200.0), MODEL, PROFILE, "auto", Calibration(), levels=impossible)
    assert (
        "no plan for m00, m01, m02 and m03 fits what --levels fixes: leave a part of it to auto"
        in choice.advice
    )
    assert choice.sync == Sync()


@pytest.mark.parametrize("mbps", [200.0, 20.0])
def test_slow_links_get_local_steps_that_run(mbps: float) -> None:
    choice = choose(mesh(SPEEDS, mbps), MODEL, PROFILE, "auto", Calibration())
    assert choice.sync.is_local
    assert choice.sync.is_encoded
    assert choice.sync.inner == 8
    assert choice.plan.is_overlapped
    blocking = choose(mesh(SPEEDS, mbps), MODEL, PROFILE, "auto", Calibration(), overlaps=False)
    assert not blocking.plan.is_overlapped
    assert blocking.sync.period > choice.sync.period
    assert len(choice.plan.order) == 4
    assert choice.plan.utilisation >= 0.9
    slower = choose(mesh(SPEEDS, mbps / 4), MODEL, PROFILE, "auto", Calibration()).sync
    assert slower.period > choice.sync.period or slower.codec != choice.sync.codec


def test_sites_with_slow_link_get_codec() -> None:
    cluster = mesh(SPEEDS, lambda a, b: 940.0 if a // 2 == b // 2 else 20.0)
    choice = choose(cluster, MODEL, PROFILE, "auto", Calibration())
    assert choice.plan.way == "sites"
    assert choice.sync.is_encoded
    assert choice.sync.codec == choice.plan.levels[1].codec
    assert choice.sync.inner == PROFILE.batch // 4, "each machine is a worker"


def test_measured_step_calibrates_predictions() -> None:
    cluster = mesh(SPEEDS, 200.0)
    exact = make_plans(cluster, MODEL, PROFILE, PlanLimits(is_given=True, is_flat=True)).chosen
    slow = choose(cluster, MODEL, PROFILE, "auto", Calibration(), (exact, 3 * exact.step_s))
    calm = choose(cluster, MODEL, PROFILE, "auto", Calibration(), (exact, exact.step_s))
    assert slow.calibration.factor("local_steps") > 2 * calm.calibration.factor("local_steps")
    assert slow.plan.period > calm.plan.period or slow.plan.codec != calm.plan.codec


class Watched:
    """Tuner with a given cluster that records its requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mbps: float, wish: Any = "auto") -> None:
        self.requested_sync: list[Sync] = []
        self.surveys = 0
        self.rested: list[tuple[str, ...]] = []
        cluster = mesh([8.0, 8.0], mbps)
        monkeypatch.setattr(tuner, "cluster_of_group", lambda *_: cluster)
        self.chooser = SyncTuner(self._survey, MODEL, PROFILE, wish, self.requested_sync.append, self._rest)

    def _rest(self, nodes: Sequence[str], why: str) -> None:
        self.rested.append((*nodes, why))

    def _survey(self) -> TopologyGraph:
        self.surveys += 1
        return TopologyGraph()

    def commit(self, count: int, generation: int = 1, sync: Sync = Sync(), step_s: float = 2.5) -> None:  # noqa: B008
        for _ in range(count):
            self.chooser.observe(GroupSample(generation, sync, (8.0, 8.0), ("a", "b"), step_s))
            thread = self.chooser._thread
            if thread is not None:
                thread.join(120)


def test_planning_waits_for_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 20.0)
    watched.commit(WARM, step_s=0.1)
    assert not watched.requested_sync, "the first commit of a group begins the counting"
    watched.commit(1, step_s=0.1)
    assert len(watched.requested_sync) == 1
    assert watched.requested_sync[0].is_local
    watched.commit(20, step_s=0.1)
    assert watched.surveys == 1, "the same machines are not planned for again"


def test_single_machine_returns_to_exact_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 20.0)
    watched.commit(WARM + 1, step_s=0.1)
    (rounds,) = watched.requested_sync
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for _ in range(3):
        watched.chooser.observe(GroupSample(2, rounds, (8.0, 8.0), ("a", "a"), 2.5))
    assert len(watched.requested_sync) == 1, "the other may be back soon"
    now[0] += 301.0
    watched.chooser.observe(GroupSample(2, rounds, (8.0, 8.0), ("a", "a"), 2.5))
    assert watched.requested_sync[1:] == [Sync()]
    watched.chooser.observe(GroupSample(2, Sync(), (8.0, 8.0), ("a", "a"), 2.5))
    watched.chooser.observe(GroupSample(2, Sync(), (8.0, 8.0), ("a", "a"), 2.5))
    assert len(watched.requested_sync) == 2


def test_few_long_steps_suffice_for_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 20.0)
    watched.commit(4, step_s=30.0)
    assert len(watched.requested_sync) == 1


def test_changed_group_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 20.0)
    watched.commit(WARM + 1)
    for _ in range(WARM + 1):
        watched.chooser.observe(GroupSample(2, Sync(), (8.0, 8.0, 8.0), ("a", "b", "c"), 2.5))
    thread = watched.chooser._thread
    assert thread is not None
    thread.join(120)
    assert len(watched.requested_sync) == 2


def test_drift_from_prediction_triggers_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watched = Watched(monkeypatch, 20.0)
    watched.commit(WARM + 1)
    sync = watched.requested_sync[0]
    predicted = watched.chooser._plan
    assert predicted is not None
    watched.commit(5, sync=sync, step_s=predicted.step_s)
    assert len(watched.requested_sync) == 1
    for _ in range(15):
        now[0] += 10.0
        watched.commit(1, sync=sync, step_s=3 * predicted.step_s)
    assert len(watched.requested_sync) == 2
    assert watched.requested_sync[1].period > sync.period or watched.requested_sync[1].codec != sync.codec


@pytest.mark.parametrize(("gain", "changes"), [(0.9, False), (1.05, False), (1.2, True)])
def test_slightly_better_plan_is_not_applied(gain: float, changes: bool) -> None:
    current = choose(mesh(SPEEDS, 200.0), MODEL, PROFILE, "auto", Calibration())
    choice = choose(mesh(SPEEDS, 20.0), MODEL, PROFILE, "auto", Calibration())
    assert choice.sync != current.sync
    plan = current.plan
    step_s = gain * plan.score * plan.step_s / choice.plan.score
    after = _keep_unless_better(choice, plan, step_s, current.sync)
    assert (after.plan, after.sync) == ((choice.plan, choice.sync) if changes else (plan, current.sync))


def test_unreachable_agent_stops_planning_not_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(monkeypatch, 20.0)

    def fail() -> TopologyGraph:
        watched.surveys += 1
        raise RunError("the agent is away")

    watched.chooser._survey = fail
    watched.commit(3 * WARM)
    assert not watched.requested_sync
    assert caplog.text.count("the agent is away") == watched.surveys == 1
    now = time.monotonic() + 61.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watched.commit(1)
    assert watched.surveys == 2, "it is asked again"
    assert caplog.text.count("the agent is away") == 1


def test_single_machine_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 20.0)
    for _ in range(2 * WARM):
        watched.chooser.observe(GroupSample(1, Sync(), (8.0,), ("a",), 2.5))
    assert watched.surveys == 0


def test_sync_of_plan_matches_plan() -> None:
    plan = choose(mesh(SPEEDS, 20.0), MODEL, PROFILE, "auto", Calibration()).plan
    sync = sync_of(plan, PROFILE, 8)
    assert sync.inner == PROFILE.batch // 8, "workers, not machines"
    assert plan.outer is not None
    assert (sync.period, sync.codec, sync.rate) == (plan.period, plan.codec, plan.outer.learning_rate)
