"""Advice of the planner, and hypothetical machines."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import ConfigError
from barnraise.planning import (
    HypotheticalMachine,
    ModelSize,
    PlanLimits,
    PlannedMachine,
    StepTimes,
    add_hypothetical,
    advise,
    build_cluster,
    make_plans,
    parse_machine,
    symmetric_link,
    without_machines,
)
from barnraise.planning.inputs.hypothetical import CARDS, LINES, PROCESSORS
from tests.unit.planning.clusters import MODEL, PROFILE, mesh


def test_switch_advice_equals_a_new_plan() -> None:
    cluster = mesh([20] * 3, 940.0)
    suggestions = {suggestion.sentence: suggestion for suggestion in advise(cluster, MODEL, PROFILE)}
    (switch,) = [suggestion for suggestion in suggestions.values() if "2.5 Gbit/s" in suggestion.sentence]
    before = make_plans(cluster, MODEL, PROFILE).chosen.samples_per_s
    after = make_plans(mesh([20] * 3, 2350.0), MODEL, PROFILE).chosen.samples_per_s
    assert switch.times == pytest.approx(after / before)
    assert switch.sentence == (
        f"A switch and ports of 2.5 Gbit/s would make this {after / before:.1f} times as fast."
    )
    assert {suggestion.what for suggestion in suggestions.values()} >= {"switch", "sync", "machine"}
    assert all(suggestion.times >= 1.05 for suggestion in suggestions.values())
    sync = next(suggestion for suggestion in suggestions.values() if suggestion.what == "sync")
    assert "at an expected cost of" in sync.sentence


def test_cable_is_advised_for_a_wireless_machine() -> None:
    """m02 has 60 Mbit/s; a switch does nothing for it."""
    cluster = mesh([20] * 3, lambda a, b: 60.0 if b == 2 else 940.0)
    cable = next(
        suggestion
        for suggestion in advise(cluster, ModelSize(parameters=20_000_000), PROFILE)
        if suggestion.what == "cable"
    )
    assert cable.sentence.startswith("A cable of 1 Gbit/s to m02 would make this ")


def test_leaving_out_a_slow_machine_is_reported() -> None:
    cluster = mesh([100, 100, 50], lambda a, b: 20.0 if b == 2 else 10_000.0)
    profile = StepTimes(batch=256, unit=8)
    (advice,) = [
        suggestion for suggestion in advise(cluster, MODEL, profile) if suggestion.what == "leave_out"
    ]
    plans = [plan for plan in make_plans(cluster, MODEL, profile).plans if plan.is_exact]
    all_machines = next(plan for plan in plans if len(plan.parts) == 3)
    alone = make_plans(without_machines(cluster, ["m02"]), MODEL, profile).chosen
    assert advice.times == pytest.approx(alone.samples_per_s / all_machines.samples_per_s)
    assert advice.sentence.startswith("Without m02 it is ")


def test_smaller_micro_batches_and_a_larger_batch_are_advised() -> None:
    """Eight micro-batches for three machines, one of them slower: the others wait."""
    profile = StepTimes(batch=256, travels="step")
    suggestions = {
        suggestion.what: suggestion for suggestion in advise(mesh([30, 25, 20], 9400.0), MODEL, profile)
    }
    assert "Micro-batches of 4 samples instead of 32" in suggestions["units"].sentence
    crowded = {suggestion.what: suggestion for suggestion in advise(mesh([20] * 3, 300.0), MODEL, PROFILE)}
    assert "A global batch of 512 instead of 256" in crowded["batch"].sentence


def test_names_with_braces_are_harmless() -> None:
    members = [PlannedMachine(name=name, samples_per_s=20) for name in ("{0}", "{times}")]
    assert advise(build_cluster(members, symmetric_link("{0}", "{times}", 940.0)), MODEL, PROFILE)
    assert advise(build_cluster(members[:1]), MODEL, PROFILE)[0].what == "machine"


def test_hypothetical_machines_are_parsed() -> None:
    assert parse_machine("2x4090@2.5gbit").tflops == 2 * parse_machine(" RTX-4090@1gbit ").tflops
    assert parse_machine("mac-m2@wifi").line == LINES["wifi"]
    assert parse_machine("pi4@100mbit").line.up_mbps == pytest.approx(94)
    assert parse_machine("4090@1gbit").memory_bytes == 24 << 30
    for device in (*CARDS, *PROCESSORS):
        for link in (*LINES, "10gbit"):
            machine = parse_machine(f"{device}@{link}")
            assert msgspec.json.decode(msgspec.json.encode(machine), type=HypotheticalMachine) == machine


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("4090", "does not describe a machine", "Write device@link"),
        ("0x4090@1gbit", "whose speed is not known", "4090"),
        ("4091@1gbit", "the device '4091'", "4090, 4080"),
        ("4090@tin-can", "the link 'tin-can'", "wifi, wifi6"),
        ("4090@0mbit", "with the rate 0", "1gbit"),
    ],
)
def test_unknown_device_or_link_lists_the_known_ones(text: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_machine(text)
    assert hint in raised.value.hint


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=20))
def test_random_text_is_a_machine_or_an_error(text: str) -> None:
    try:
        machine = parse_machine(text)
    except ConfigError:
        return
    assert machine.tflops > 0


def test_hypothetical_machine_is_linked_as_fast_as_both_ends_allow() -> None:
    model = ModelSize(parameters=100_000_000, flops_per_sample=6e9)
    home = build_cluster([PlannedMachine(name="pc", samples_per_s=100, tflops=50.0)])
    specs = ["4090@1gbit", "4090@1gbit", "mac-m2@wifi", "4090@10gbit", "3090@dsl"]
    cluster = add_hypothetical(home, map(parse_machine, specs), model)
    names = [member.name for member in cluster.members]
    assert names == ["3090@dsl", "4090@10gbit", "4090@1gbit", "4090@1gbit 2", "mac-m2@wifi", "pc"]
    rates = {(path.source, path.target): path.mbps for path in cluster.paths}
    assert rates["4090@10gbit", "4090@1gbit"] == pytest.approx(940)
    assert rates["mac-m2@wifi", "4090@10gbit"] == 200
    assert rates["3090@dsl", "pc"] == 20
    assert rates["pc", "3090@dsl"] == 100
    assert len(rates) == 6 * 5
    speeds = {member.name: member.samples_per_s for member in cluster.members}
    assert speeds["4090@1gbit"] == pytest.approx(0.7 * 82.6 * 2), "as fast for its TFLOPS as the pc"
    assert all("rough public" in note for note in cluster.notes)
    ranking = make_plans(cluster, model, StepTimes(batch=512, unit=8), PlanLimits(sync="auto"))
    assert ranking.chosen.speedup >= 1
    assert ("3090@dsl",) in ranking.sites
    with pytest.raises(ConfigError, match="with this model is unknown"):
        add_hypothetical(mesh([1]), [parse_machine("4090@1gbit")], MODEL)
