"""The simulator of trainings: its links against formulas, its session against what must always hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from backyard.collectives.program import Kind, Layout
from backyard.planning import Model, StepProfile
from backyard.runs.leases import Course
from backyard.training.sync import Sync
from benchmarks.fake_clock import FakeClock
from benchmarks.simulation.figures import chosen_while_training, figures, graph_of, run, sync_named, train
from benchmarks.simulation.network import Link, Network, Way
from benchmarks.simulation.operations import Operation, compiled
from benchmarks.simulation.training import Costs, Training
from benchmarks.simulation.worlds import Churn, World, homes, lab_world

NUMBERS = 240_000
COURSE = Course(samples=1 << 30, batch=32, unit=2, seed=0)


def arrivals(
    sizes: dict[tuple[int, int], float], ups: list[float], down: float
) -> dict[tuple[int, int], float]:
    """When one message from each to each arrives; rates in bytes per second."""
    clock = FakeClock()
    out = [Link(f"from {one}", rate * 8e-6) for one, rate in enumerate(ups)]
    into = [Link(f"to {one}", down * 8e-6) for one in range(len(ups))]
    network = Network(clock, lambda a, b: Way((out[a], into[b]), 0.5))
    came: dict[tuple[int, int], float] = {}
    for (a, b), size in sizes.items():
        network.send("test", a, b, size, lambda pair=(a, b): came.setdefault(pair, clock.now))
    clock.run(1e6)
    return came


def test_streams_share_a_link_and_take_what_others_leave() -> None:
    # Two to the same machine: half of its 100 each; the shorter is done first and leaves its half.
    came = arrivals({(0, 2): 100.0, (1, 2): 300.0}, [1000.0, 1000.0, 1000.0], 100.0)
    assert came == {(0, 2): pytest.approx(2.5), (1, 2): pytest.approx(4.5)}
    # The first can only send 20, so the second has 80.
    came = arrivals({(0, 2): 100.0, (1, 2): 400.0}, [20.0, 1000.0, 1000.0], 100.0)
    assert came == {(0, 2): pytest.approx(5.5), (1, 2): pytest.approx(5.5)}


@given(some.lists(some.tuples(some.integers(0, 3), some.integers(0, 3), some.integers(1, 500)), max_size=12))
def test_everything_arrives_and_no_link_is_overfull(messages: list[tuple[int, int, int]]) -> None:
    clock = FakeClock()
    links = {name: Link(name, 8e-4) for name in "abcdefgh"}  # 100 bytes a second
    network = Network(clock, lambda a, b: Way((links["abcd"[a]], links["efgh"[b]]), 0.0))
    came = []
    for a, b, size in messages:
        network.send("test", a, b, size, lambda size=size: came.append((clock.now, size)))
    clock.run(1e6)
    assert sorted(size for _, size in came) == sorted(size for _, _, size in messages)
    end = max((when for when, _ in came), default=0.0)
    for link in links.values():
        assert link.carried <= 100 * end * (1 + 1e-9)
    loads = [sum(size for a, _, size in messages if a == one) for one in range(4)]
    assert [links[name].carried for name in "abcd"] == loads


@pytest.mark.parametrize("world", [2, 4, 7])
def test_a_ring_takes_what_the_formula_says(world: int) -> None:
    size, rate = 28_000_000, 1e6
    clock = FakeClock()
    out = [Link(f"from {one}", rate * 8e-6) for one in range(world)]
    into = [Link(f"to {one}", rate * 8e-6) for one in range(world)]
    network = Network(clock, lambda a, b: Way((out[a], into[b]), 0.01))
    ended: dict[int, float] = {}
    programs = compiled(Kind.ALL_REDUCE, "ring", world, Layout(sizes=(size,), item=4, segment=1 << 18))
    operation = Operation(
        network, "test", range(world), programs, lambda rank: ended.setdefault(rank, clock.now)
    )
    for rank in range(world):
        operation.begin(rank)
    clock.run(1e6)
    assert len(ended) == world
    assert max(ended.values()) == pytest.approx(2 * (world - 1) / world * size / rate, rel=0.02)
    assert {link.carried for link in out} == {2 * (world - 1) * size / world}


def begun(world: World, sync: str = "exact", costs: Costs | None = None, numbers: int = NUMBERS) -> Training:
    return train(world, COURSE, numbers, costs or Costs(), sync_named(sync))


def test_a_step_is_computing_then_the_sum() -> None:
    training = begun(lab_world(4, 100, 0, 8.0), numbers=20_000_000)
    run(training, 3)
    line = 1.5 * 80e6 / (100e6 / 8 * 0.956)
    assert figures(training.commits, 1.0).step_s == pytest.approx(1.0 + line, rel=0.01)


def test_a_round_sends_once_for_all_its_batches() -> None:
    training = begun(lab_world(4, 100, 0, 8.0), "8:bf16", numbers=20_000_000)
    run(training, 2 + 3 * 8)
    found = figures(training.commits, 1.0)
    assert found.sync.period == 8
    line = 1.5 * 40e6 / (100e6 / 8 * 0.956)
    assert found.step_s == pytest.approx(1.0 + line / 8, rel=0.02)
    assert (training.ledger.lost, training.ledger.doubled) == (0, 0)


def carried(machines: int) -> set[int]:
    world = homes(3, machines, seed=3)
    training = begun(world)
    run(training, 2)
    gradients = [wire.carried for wire in world.wires]
    words = 2 * 1024 * machines * 2 * machines  # those of the other sites' machines, in two commits
    return {round(one - words) for one in gradients}


def test_what_crosses_between_sites_does_not_depend_on_how_many_machines_they_have() -> None:
    few = carried(2)
    assert few == carried(5)
    assert max(few) == pytest.approx(2 * (2 * 2 / 3 * 4 * NUMBERS), rel=1e-4)


@pytest.mark.parametrize("during", ["computing", "the sum"])
def test_the_units_of_the_dead_are_computed_again_and_no_others(during: str) -> None:
    world = lab_world(4, 100, 0, 8.0)
    training = begun(world, numbers=20_000_000)
    world.clock.later(0.5 if during == "computing" else 3.0, lambda: training.die(2))
    run(training, 1)
    ledger = training.ledger
    assert (ledger.once, ledger.lost, ledger.doubled) == (16, 0, 0)
    assert ledger.computed == 16 if during == "computing" else 20
    assert training.members == [0, 1, 3]


def test_a_death_after_all_hold_the_result_costs_nothing() -> None:
    world = lab_world(4, 100, 50, 8.0)
    training = begun(world, costs=Costs(notice_s=0.001))
    training.begin()
    world.clock.run_until(lambda: len(training.holders) == 4)
    training.die(1)
    world.clock.run_until(lambda: len(training.commits) == 1)
    assert training.ledger.computed == training.ledger.once == 16
    assert training.generation == 2
    world.clock.run_until(lambda: len(training.commits) == 3)
    assert training.ledger.once == 48


@pytest.mark.parametrize("sync", ["exact", "4:exact", "4:int8"])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_unit_counts_exactly_once_whoever_dies(seed: int, sync: str) -> None:
    world = homes(3, 3, seed=seed)
    training = begun(world, sync)
    churn = Churn(world, training, seed, life_s=120.0, away_s=10.0, state_bytes=1e6)
    run(training, 30)
    ledger = training.ledger
    assert (ledger.lost, ledger.doubled) == (0, 0)
    assert ledger.once == 16 * sum(one.batches for one in training.commits)
    assert churn.deaths > 2
    assert ledger.computed > ledger.once
    assert min(one.members for one in training.commits) < 9


def test_the_same_seed_gives_the_same_training() -> None:
    def once() -> list[float]:
        world = homes(3, 4, seed=5)
        training = begun(world)
        Churn(world, training, 7, life_s=60.0, away_s=10.0, state_bytes=1e6)
        run(training, 12)
        return [one.at for one in training.commits]

    assert once() == once()


def test_shares_follow_speeds() -> None:
    world = lab_world(4, 1000, 0, 8.0)
    slow = begun(world._replace(speeds={0: 2.0, 1: 8.0, 2: 8.0, 3: 8.0}))
    run(slow, 4)
    assert slow.commits[0].seconds > 4.0  # everybody has a quarter, and one is slow
    assert slow.commits[-1].seconds == pytest.approx(32 / 26, rel=0.25)


def test_the_sessions_own_planner_takes_rounds_where_the_line_is_slow() -> None:
    world = lab_world(4, 200, 0, 8.0)
    training = begun(world, numbers=20_000_000)
    model, profile = Model(parameters=20_000_000), StepProfile(batch=32, unit=2)
    with chosen_while_training(training, model, profile, "auto", graph_of(world)):
        run(training, 200)
    found = figures(training.commits, 1.0)
    assert training.commits[0].sync == Sync()
    assert found.sync.is_local
    assert found.utilisation > 0.9
