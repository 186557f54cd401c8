"""Planner: never slower than one machine, deterministic, and with consistent figures."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import RunError
from barnraise.planning import (
    LOSSY,
    Calibration,
    Level,
    Levels,
    ModelSize,
    NetworkPath,
    Plan,
    PlanCluster,
    PlanLimits,
    PlannedMachine,
    PlanRanking,
    StepTimes,
    build_cluster,
    cluster_from_graph,
    make_plans,
    symmetric_link,
)
from barnraise.planning.inputs.codecs import PlanCodec
from barnraise.planning.inputs.problem import PlanProblem
from barnraise.planning.plan.groups import worthwhile_groups
from barnraise.topology import Device, LinkFacts, NodeFacts, build_graph
from tests.unit.planning.clusters import MODEL, PROFILE, clusters, mesh, models, profiles
from tests.unit.topology.graphs import machine, node

syncs = st.sampled_from(["exact", "auto"])


@settings(max_examples=40, deadline=None)
@given(clusters(), models, profiles, syncs)
def test_chosen_plan_is_never_slower_than_the_best_machine(cluster, model, profile, sync) -> None:  # type: ignore[no-untyped-def]
    ranking = make_plans(cluster, model, profile, PlanLimits(sync=sync))
    assert ranking.chosen.samples_per_s >= ranking.best_alone.samples_per_s
    assert ranking.best_alone.parts[0].name in {
        member.name
        for member in cluster.members
        if member.samples_per_s == max(each.samples_per_s for each in cluster.members)
    }
    assert ranking.chosen.is_exact or sync == "auto"
    assert [plan.score for plan in ranking.plans] == sorted(
        (plan.score for plan in ranking.plans), reverse=True
    )
    assert ranking.chosen == next(plan for plan in ranking.plans if plan.is_allowed)
    assert {plan.order for plan in ranking.plans if plan.kind == "alone"} == {
        (member.name,) for member in cluster.members
    }
    for plan in ranking.plans:
        _hold_together(plan, profile)


def _hold_together(plan: Plan, profile: StepTimes) -> None:
    """Check that a plan's figures agree with each other."""
    phases = plan.phases
    parts = (phases.compute_s, phases.communication_s, phases.waiting_s, phases.overhead_s)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(plan.step_s)
    assert 0 < plan.utilisation <= 1
    assert plan.utilisation == pytest.approx(phases.compute_s / plan.step_s)
    assert sorted(plan.order) == sorted(part.name for part in plan.parts)
    assert (plan.quality.cost == 0) or not plan.is_exact
    assert sum(part.sends_bytes for part in plan.parts) == pytest.approx(
        sum(part.receives_bytes for part in plan.parts)
    )
    samples = sum(part.samples for part in plan.parts)
    assert samples / plan.step_s == pytest.approx(plan.samples_per_s, rel=1e-6)
    if plan.kind != "local_steps":
        assert samples == profile.batch
    else:
        assert plan.period >= 2
        assert all(part.inner_steps for part in plan.parts)
    assert plan.reason.endswith(".")


@settings(max_examples=20, deadline=None)
@given(clusters(), models, profiles, syncs, st.randoms(use_true_random=False))
def test_order_of_machines_does_not_matter(cluster, model, profile, sync, chance) -> None:  # type: ignore[no-untyped-def]
    members, paths = list(cluster.members), list(cluster.paths)
    chance.shuffle(members)
    chance.shuffle(paths)
    ranking = make_plans(cluster, model, profile, PlanLimits(sync=sync))
    assert make_plans(build_cluster(members, paths), model, profile, PlanLimits(sync=sync)) == ranking
    assert msgspec.json.decode(msgspec.json.encode(ranking), type=PlanRanking) == ranking


@settings(max_examples=25, deadline=None)
@given(clusters(), models, profiles, st.sampled_from([2.0, 16.0]))
def test_faster_network_never_makes_the_plan_slower(cluster, model, profile, factor) -> None:  # type: ignore[no-untyped-def]
    def faster(path: NetworkPath) -> NetworkPath:
        return msgspec.structs.replace(path, mbps=path.mbps * factor)

    before = make_plans(cluster, model, profile).chosen
    after = make_plans(build_cluster(cluster.members, map(faster, cluster.paths)), model, profile).chosen
    assert after.step_s <= before.step_s * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(clusters(max_machines=5, site="home"), models, profiles, st.integers(0, 1000), st.floats(1.0, 100.0))
def test_no_single_faster_path_makes_rings_slower(cluster, model, profile, which, factor) -> None:  # type: ignore[no-untyped-def]
    """Holds for rings, where every order is tried; trees and site leaders come from candidates."""
    options = PlanLimits(levels=Levels(inside=Level(all_reduce="ring")))
    before = make_plans(cluster, model, profile, options).chosen
    paths = list(cluster.paths)
    if paths:
        place = which % len(paths)
        paths[place] = msgspec.structs.replace(paths[place], mbps=paths[place].mbps * factor)
    after = make_plans(build_cluster(cluster.members, paths), model, profile, options).chosen
    assert after.step_s <= before.step_s * (1 + 1e-9)


def test_single_machine_is_chosen_with_what_would_change_it() -> None:
    ranking = make_plans(mesh([100, 100]), MODEL, PROFILE)
    assert ranking.chosen.name == "m00 alone"
    assert ranking.chosen.speedup == 1.0
    assert ranking.reason.startswith("m00 alone is fastest: 2.56 s for a batch. The best group, m00 and m01,")
    assert "m00 and m01 would be as fast if links were 2.8 times as fast (2.64 Gbit/s from" in ranking.reason
    at_once = make_plans(mesh([100, 100], 2700.0), MODEL, PROFILE).chosen
    assert at_once.kind == "every_step"
    not_yet = make_plans(mesh([100, 100], 2550.0), MODEL, PROFILE).chosen
    assert not_yet.kind == "alone"


def test_no_network_makes_a_useless_machine_useful() -> None:
    ranking = make_plans(mesh([100, 0.1]), MODEL, StepTimes(batch=8, unit=1))
    assert "No other machine" in ranking.reason, "it would not get a single unit"
    ranking = make_plans(mesh([100, 0.1], 1e6), MODEL, StepTimes(batch=8, unit=4))
    assert ranking.chosen.name == "m00 alone"


def test_slow_machine_is_left_out() -> None:
    cluster = mesh([100, 100, 50], lambda a, b: 20.0 if b == 2 else 10_000.0)
    ranking = make_plans(cluster, MODEL, PROFILE)
    assert [part.name for part in ranking.chosen.parts] == ["m00", "m01"]
    assert "Adding m02 would not make it faster." in ranking.reason


def test_slow_path_is_avoided_by_the_ring_order() -> None:
    cluster = mesh([10] * 4, lambda a, b: 10.0 if (a, b) in ((0, 1), (2, 3)) else 940.0, site="home")
    options = PlanLimits(levels=Levels(inside=Level(all_reduce="ring")))
    chosen = make_plans(cluster, MODEL, PROFILE, options).chosen
    assert chosen.way == "ring"
    hops = {frozenset(pair) for pair in zip(chosen.order, chosen.order[1:] + chosen.order[:1], strict=True)}
    assert hops.isdisjoint({frozenset(("m00", "m01")), frozenset(("m02", "m03"))})
    assert chosen.slowest_link is not None
    assert chosen.slowest_link.mbps == pytest.approx(940)
    assert chosen.slowest_link.bytes_per_step == pytest.approx(2 * 3 / 4 * MODEL.gradient_bytes)


def test_machines_that_reach_only_one_form_a_star() -> None:
    members = [PlannedMachine(name=name, samples_per_s=10) for name in ("hub", "x", "y", "z")]
    paths = [path for name in "xyz" for path in symmetric_link("hub", name, 940.0)]
    chosen = make_plans(build_cluster(members, paths), ModelSize(parameters=1_000_000), PROFILE).chosen
    assert (chosen.way, chosen.order[0]) == ("star", "hub")
    assert {part.name: part.sends_bytes for part in chosen.parts}["hub"] == pytest.approx(3 * 4e6)


def test_sites_cross_a_slow_link_once_and_leaders_have_the_best_link() -> None:
    """Two sites of three machines; links between them are slow, the best is from m02 to m03."""

    def rate(a: int, b: int) -> float:
        if (a < 3) == (b < 3):
            return 940.0
        return 100.0 if (a, b) == (2, 3) else 20.0

    cluster = mesh([10] * 6, rate)
    ranking = make_plans(cluster, ModelSize(parameters=10_000_000), StepTimes(batch=600, unit=10))
    chosen = ranking.chosen
    assert ranking.sites == (("m00", "m01", "m02"), ("m03", "m04", "m05"))
    assert chosen.way == "sites"
    assert [site.leader for site in chosen.sites] == ["m02", "m03"]
    inside, across = chosen.levels
    assert (inside.level, inside.codec, across.all_reduce) == ("inside", "exact", "ring")
    assert chosen.slowest_link is not None
    assert chosen.slowest_link.mbps == pytest.approx(100)


def test_sites_share_every_step_inside_and_rounds_across() -> None:
    cluster = mesh([10] * 4, lambda a, b: 9400.0 if a // 2 == b // 2 else 5.0)
    ranking = make_plans(cluster, MODEL, StepTimes(batch=640, unit=10), PlanLimits(sync="auto"))
    local = next(plan for plan in ranking.plans if plan.kind == "local_steps" and plan.way == "sites")
    inside, across = local.levels
    assert (inside.period, inside.codec) == (1, "exact")
    assert across.period == local.period > 1
    steps = {part.name: part.inner_steps for part in local.parts}
    assert steps["m00"] == steps["m01"], "machines of a site are one worker"


def test_encoded_gradients_of_a_session_go_through_separate_sites() -> None:
    options = PlanLimits(sync="auto", is_given=True, is_flat=True)
    profile = StepTimes(batch=640, unit=10)

    def encoded(between: float) -> list[Plan]:
        cluster = mesh([10] * 4, lambda a, b: 900.0 if a // 2 == b // 2 else between)
        plans = make_plans(cluster, MODEL, profile, options).plans
        lossy = [plan for plan in plans if not plan.is_exact]
        assert {plan.kind for plan in lossy} == {"every_step", "local_steps"}
        return lossy

    apart = encoded(20.0)
    assert {plan.way for plan in apart} == {"sites"}
    for plan in apart:
        inside, across = plan.levels
        assert (inside.codec, across.codec) == ("exact", plan.codec)
        assert inside.period == across.period == plan.period, "machines of a site do not share every step"
        assert inside.reduce is not None
        assert plan.kind == "every_step" or len({part.inner_steps for part in plan.parts}) == 1
        assert plan.slowest_link is not None
        if plan.codec in ("fp16", "bf16", "int8", "int4"):  # smaller ones may take less than what is inside
            assert plan.slowest_link.mbps == pytest.approx(20)
    assert {plan.way for plan in encoded(300.0)} <= {"ring", "star", "tree"}


def test_more_machines_at_a_site_add_no_cross_traffic() -> None:
    """The bytes of an int8 step on the slow link, with two and with four machines at each of two sites."""
    options = PlanLimits(sync="auto", is_given=True, is_flat=True)
    crossing = []
    for each in (2, 4):
        cluster = mesh([10] * 2 * each, lambda a, b, each=each: 900.0 if a // each == b // each else 20.0)
        plans = make_plans(cluster, MODEL, StepTimes(batch=640, unit=10), options).plans
        int8 = next(plan for plan in plans if plan.kind == "every_step" and plan.codec == "int8")
        assert int8.slowest_link is not None
        crossing.append(int8.slowest_link.bytes_per_step)
        # To the leader exactly, across and back as int8: 3.6 s and 40 s and 0.9 s, and the links' own factor.
        assert int8.wire.transfer_s == pytest.approx(3.556 + 40 + 0.889, rel=0.01)
    assert crossing == [pytest.approx(100e6)] * 2


def test_lossy_plans_are_shown_with_their_cost_and_only_chosen_if_allowed() -> None:
    shown = make_plans(mesh([10] * 4, 100.0), MODEL, PROFILE)
    names = {plan.codec for plan in shown.plans if plan.kind == "every_step"}
    assert names == {"exact", "fp16", "bf16", "int8", "int4", "topk", "powersgd"}
    for plan in shown.plans:
        assert plan.is_allowed == plan.is_exact
        if not plan.is_exact:
            assert plan.quality.cost > 0
            assert plan.quality.source
    allowed = make_plans(mesh([10] * 4, 100.0), MODEL, PROFILE, PlanLimits(sync="auto"))
    assert not allowed.chosen.is_exact
    assert "with --sync auto" in shown.reason
    assert f"the loss is expected to end {allowed.chosen.quality.cost:.1%} higher" in shown.reason
    # A cost that outweighs the speed: exact again.
    dear = PlanLimits(sync="auto", speed_per_loss=1000.0)
    assert make_plans(mesh([10] * 4, 500.0), MODEL, PROFILE, dear).chosen.is_exact


def test_fixed_settings_are_respected() -> None:
    cluster = mesh([10] * 4, 100.0)
    levels = Levels(inside=Level(all_reduce="star", codec="int8", period=7))
    ranking = make_plans(cluster, MODEL, PROFILE, PlanLimits(sync="auto", levels=levels))
    groups = [plan for plan in ranking.plans if plan.kind != "alone"]
    assert {(plan.way, plan.codec, plan.period) for plan in groups} == {("star", "int8", 7)}
    only = PlanLimits(codecs=tuple(codec for codec in LOSSY if codec.name == "int8"), local_steps=False)
    kinds = {(plan.kind, plan.codec) for plan in make_plans(cluster, MODEL, PROFILE, only).plans}
    assert kinds == {("alone", "exact"), ("every_step", "exact"), ("every_step", "int8")}
    crossing = mesh([10] * 4, lambda a, b: 900.0 if a // 2 == b // 2 else 50.0)
    across = PlanLimits(sync="auto", levels=Levels(across=Level(codec="int4", period=1)))
    for plan in make_plans(crossing, MODEL, PROFILE, across).plans:
        between = len({int(name[1:]) // 2 for name in plan.order}) > 1
        assert not between or (plan.way, plan.codec, plan.period) == ("sites", "int4", 1)


def test_encoding_time_is_counted() -> None:
    def price(mb_per_s: float) -> Plan:
        codec = PlanCodec(name="int8", bytes_per_parameter=1.0, mb_per_s=mb_per_s)
        plans = make_plans(
            mesh([10, 10]), MODEL, PROFILE, PlanLimits(codecs=(codec,), local_steps=False)
        ).plans
        return next(plan for plan in plans if plan.codec == "int8")

    assert price(100.0).step_s - price(400.0).step_s == pytest.approx(4.0 - 1.0)


def test_machines_without_memory_are_left_out_or_reported() -> None:
    model = ModelSize(parameters=1_000_000_000, activation_bytes_per_sample=1e6)
    small = PlannedMachine(name="small", samples_per_s=50, memory_bytes=16 << 30)
    large = PlannedMachine(name="large", samples_per_s=40, memory_bytes=28 << 30)
    unknown = PlannedMachine(name="unknown", samples_per_s=5)
    members = [small, large, unknown]
    paths = [
        path
        for a in members
        for b in members
        if a.name < b.name
        for path in symmetric_link(a.name, b.name, 10_000)
    ]
    ranking = make_plans(build_cluster(members, paths), model, PROFILE, PlanLimits(sync="auto"))
    assert all("small" not in plan.order for plan in ranking.plans)
    assert ranking.notes == ("small is left out: it has 16 GiB and the model needs 22.4 GiB.",)
    rounds = [plan for plan in ranking.plans if plan.kind == "local_steps"]
    assert all("large" not in plan.order for plan in rounds), "rounds need 12 to 16 bytes a parameter more"
    with pytest.raises(RunError, match=r"needs 22\.4 GiB on each machine, and small, the largest, has 16"):
        make_plans(build_cluster([small]), model, PROFILE)
    with pytest.raises(RunError, match="no machine has a known speed"):
        make_plans(build_cluster([]), model, PROFILE)


def test_gradients_hide_in_the_last_backward_pass_or_in_all_of_it() -> None:
    """Two machines, 16 micro-batches each: a session hides in the last one, a plain script in the step."""
    cluster, model = mesh([10, 10], 940.0), ModelSize(parameters=100_000_000)
    session = make_plans(cluster, model, StepTimes(batch=256, unit=8)).chosen
    script = make_plans(cluster, model, StepTimes(batch=256, unit=8, travels="step")).chosen
    assert session.wire.hideable_s == pytest.approx(2 / 3 * 0.8)
    assert script.wire.hideable_s == pytest.approx(2 / 3 * 12.8)
    on_wire = session.wire.factor * session.wire.transfer_s
    share = StepTimes(batch=1).bucket_bytes / model.gradient_bytes
    assert script.phases.communication_s == pytest.approx(on_wire * share), "only the last bucket is seen"
    assert session.phases.communication_s == pytest.approx(on_wire - session.wire.hideable_s * (1 - share))


def test_measured_graph_becomes_a_cluster() -> None:
    fast, slow = Device("cuda", 0, "4090", 24 << 30, 60.0), Device("cpu", 0, "pi", 4 << 30, 0.02)
    nodes = [
        NodeFacts(node=node(0), name="pc", machine=machine(fast, slow)),
        NodeFacts(node=node(1), name="pc", machine=machine(fast, fast)),
        NodeFacts(node=node(2), name="pi", machine=machine(slow)),
        NodeFacts(node=node(3), name="dark"),
    ]
    links = [
        LinkFacts(a=node(0), b=node(1), rtt_s=0.001, mbps=940.0),
        LinkFacts(a=node(0), b=node(2), rtt_s=0.002),
    ]
    cluster = cluster_from_graph(build_graph(nodes, links), MODEL, {node(0): 120.0})
    speeds = {member.name: member.samples_per_s for member in cluster.members}
    assert speeds == {"pc (00000000)": 120.0, "pc (01010101)": 240.0, "pi": pytest.approx(0.04)}
    assert [member.memory_bytes >> 30 for member in cluster.members] == [24, 24, 4]
    assert cluster.paths[0].mbps == 940.0
    assert cluster.paths[0].latency_s == 0.0005
    assert cluster.notes == (
        "dark is left out: its speed with this model is unknown.",
        "The link between pc (00000000) and pi was not measured; 100 Mbit/s is assumed.",
    )
    by_flops = cluster_from_graph(build_graph(nodes, links), ModelSize(parameters=1, flops_per_sample=6e9))
    assert by_flops.members[0].samples_per_s == pytest.approx(60e12 * 0.35 / 6e9)
    assert cluster_from_graph(build_graph(nodes, links), MODEL).members == ()


def _many(count: int) -> PlanCluster:
    numbers = random.Random(5)
    speeds = [numbers.uniform(5, 40) for _ in range(count)]
    return mesh(speeds, lambda a, b: numbers.uniform(20, 1000))


def _fastest_s(work: Callable[[], object], enough_s: float) -> float:
    """Return the processor time; time of a preempted processor counts as used."""
    took: list[float] = []
    while len(took) < 4 and min(took, default=enough_s) >= enough_s:
        begin = time.process_time()
        work()
        took.append(time.process_time() - begin)
    return min(took)


def test_all_subsets_of_eight_machines_are_tried_within_a_second() -> None:
    cluster = _many(8)
    question = PlanProblem(cluster, MODEL, PROFILE, PlanLimits(), Calibration())
    assert len(worthwhile_groups(question, question.all_members)) == 2**8 - 8 - 1
    assert _fastest_s(lambda: make_plans(cluster, MODEL, PROFILE, PlanLimits(sync="auto")), 1.0) < 1.0


def test_sixty_four_machines_take_less_than_five_seconds() -> None:
    cluster, rankings = _many(64), []

    def plan() -> None:
        rankings.append(make_plans(cluster, ModelSize(parameters=20_000_000), StepTimes(batch=4096, unit=8)))

    assert _fastest_s(plan, 5.0) < 5.0
    ranking = rankings[0]
    assert len(ranking.chosen.parts) > 32
    assert ranking.chosen.speedup > 10


def test_machines_behind_a_slow_link_are_left_out_or_separate() -> None:
    """Ten fast machines on a LAN and six slow ones behind 10 Mbit/s."""
    cluster = mesh([20] * 10 + [1] * 6, lambda a, b: 940.0 if a < 10 and b < 10 else 10.0)
    ranking = make_plans(cluster, ModelSize(parameters=20_000_000), StepTimes(batch=1280, unit=8))
    assert sorted(part.name for part in ranking.chosen.parts) == [f"m{number:02}" for number in range(10)]
