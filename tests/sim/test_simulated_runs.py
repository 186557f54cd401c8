"""The simulator of trainings: its links against formulas, its session against what must always hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as some

from barnraise.collectives.algorithms.schedule import BufferLayout, OperationKind
from barnraise.core.errors import ProtocolError, RunError
from barnraise.planning import ModelSize, StepTimes
from barnraise.runs.commit import CommitDecision, MemberState, decide_commit
from barnraise.runs.sharding import DataOrder
from barnraise.training.steps.progress import StepProgress
from barnraise.training.sync import Sync
from benchmarks.simulation import training as simulated
from benchmarks.simulation.fake_clock import FakeClock
from benchmarks.simulation.figures import (
    Figures,
    chosen_while_training,
    figures,
    graph_of,
    run,
    sync_named,
    train,
)
from benchmarks.simulation.network import Link, Network, Way
from benchmarks.simulation.networks import Churn, Lines, World, homes, lab_world
from benchmarks.simulation.operations import Operation, compiled
from benchmarks.simulation.training import Costs, Training

NUMBERS = 240_000
COURSE = DataOrder(samples=1 << 30, batch=32, micro_batch_size=2, seed=0)


def arrivals(
    sizes: dict[tuple[int, int], float], ups: list[float], down: float
) -> dict[tuple[int, int], float]:
    """Return when one message from each to each arrives; rates in bytes per second."""
    clock = FakeClock()
    out = [Link(f"from {number}", rate * 8e-6) for number, rate in enumerate(ups)]
    into = [Link(f"to {number}", down * 8e-6) for number in range(len(ups))]
    network = Network(clock, lambda a, b: Way((out[a], into[b]), 0.5))
    arrived: dict[tuple[int, int], float] = {}
    for (a, b), size in sizes.items():
        network.send("test", a, b, size, lambda pair=(a, b): arrived.setdefault(pair, clock.now))
    clock.run(1e6)
    return arrived


def test_streams_share_a_link_and_take_what_others_leave() -> None:
    # Two to the same machine: half of its 100 each; the shorter is done first and leaves its half.
    arrived = arrivals({(0, 2): 100.0, (1, 2): 300.0}, [1000.0, 1000.0, 1000.0], 100.0)
    assert arrived == {(0, 2): pytest.approx(2.5), (1, 2): pytest.approx(4.5)}
    # The first can only send 20, so the second has 80.
    arrived = arrivals({(0, 2): 100.0, (1, 2): 400.0}, [20.0, 1000.0, 1000.0], 100.0)
    assert arrived == {(0, 2): pytest.approx(5.5), (1, 2): pytest.approx(5.5)}


@given(some.lists(some.tuples(some.integers(0, 3), some.integers(0, 3), some.integers(1, 500)), max_size=12))
def test_everything_arrives_and_no_link_is_overfull(messages: list[tuple[int, int, int]]) -> None:
    clock = FakeClock()
    links = {name: Link(name, 8e-4) for name in "abcdefgh"}  # 100 bytes a second
    network = Network(clock, lambda a, b: Way((links["abcd"[a]], links["efgh"[b]]), 0.0))
    arrived = []
    for a, b, size in messages:
        network.send("test", a, b, size, lambda size=size: arrived.append((clock.now, size)))
    clock.run(1e6)
    assert sorted(size for _, size in arrived) == sorted(size for _, _, size in messages)
    end = max((when for when, _ in arrived), default=0.0)
    for link in links.values():
        assert link.carried <= 100 * end * (1 + 1e-9)
    loads = [sum(size for a, _, size in messages if a == source) for source in range(4)]
    assert [links[name].carried for name in "abcd"] == loads


@pytest.mark.parametrize("world", [2, 4, 7])
def test_ring_takes_the_predicted_time(world: int) -> None:
    size, rate = 28_000_000, 1e6
    clock = FakeClock()
    out = [Link(f"from {number}", rate * 8e-6) for number in range(world)]
    into = [Link(f"to {number}", rate * 8e-6) for number in range(world)]
    network = Network(clock, lambda a, b: Way((out[a], into[b]), 0.01))
    ended: dict[int, float] = {}
    programs = compiled(
        OperationKind.ALL_REDUCE, "ring", world, BufferLayout(sizes=(size,), item=4, segment=1 << 18)
    )
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


def test_step_is_computing_then_all_reduce() -> None:
    training = begun(lab_world(4, 100, 0, 8.0), numbers=20_000_000)
    run(training, 3)
    line = 1.5 * 80e6 / (100e6 / 8 * 0.956)
    assert figures(training.commits, 1.0).step_s == pytest.approx(1.0 + line, rel=0.01)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("period", [2, 8])
def test_round_sends_once_for_all_its_batches(period: int, *, overlaps: bool) -> None:
    training = begun(lab_world(4, 100, 0, 8.0), f"{period}:bf16", numbers=20_000_000)
    training.overlaps = overlaps
    run(training, 2 + 4 * period)
    result = figures(training.commits, 1.0)
    assert result.sync.period == period
    line = 1.5 * 40e6 / (100e6 / 8 * 0.956)  # 5 s: two batches do not hide it, eight do
    expected = max(1.0, line / period) if overlaps else 1.0 + line / period
    assert result.step_s == pytest.approx(expected, rel=0.04)
    assert (training.ledger.lost, training.ledger.doubled) == (0, 0)
    assert (training.ledger.ahead > 0) == overlaps


def test_change_of_period_waits_until_no_member_is_ahead() -> None:
    training = begun(lab_world(4, 100, 0, 8.0), "4:exact")
    run(training, 2 + 2 * 4)
    training.wanted = sync_named("2:exact")
    training.clock.run_until(lambda: training.sync.period == 2)
    # The third round has the word in its sum. When it is committed, all are ahead of it in one of four.
    assert [commit.sync.period for commit in training.commits] == [1, 1, 4, 4, 4, 4]
    assert training.in_hand == 0
    run_on(training, 2)
    assert training.ledger.once == 16 * covered(training)


def run_on(training: Training, commits: int) -> None:
    wanted = len(training.commits) + commits
    training.clock.run_until(lambda: len(training.commits) >= wanted)


def covered(training: Training) -> int:
    return sum(commit.batches for commit in training.commits)


def carried(machines: int) -> set[int]:
    world = homes(3, machines, seed=3)
    training = begun(world)
    run(training, 2)
    gradients = [wire.carried for wire in world.wires]
    words = 2 * 1024 * machines * 2 * machines  # those of the other sites' machines, in two commits
    return {round(sent_bytes - words) for sent_bytes in gradients}


def test_traffic_between_sites_does_not_depend_on_their_size() -> None:
    few = carried(2)
    assert few == carried(5)
    assert max(few) == pytest.approx(2 * (2 * 2 / 3 * 4 * NUMBERS), rel=1e-4)


@pytest.mark.parametrize("during", ["computing", "the sum"])
def test_micro_batches_of_lost_members_are_computed_again(during: str) -> None:
    world = lab_world(4, 100, 0, 8.0)
    training = begun(world, numbers=20_000_000)
    world.clock.later(0.6 if during == "computing" else 3.0, lambda: training.die(2))
    run(training, 1)
    ledger = training.ledger
    assert (ledger.once, ledger.lost, ledger.doubled) == (16, 0, 0)
    assert ledger.computed == 16 + (2 if during == "computing" else 4)
    assert training.members == [0, 1, 3]


def test_work_computed_ahead_survives_a_loss() -> None:
    """Work of the other members, in this round and the next, is not computed again."""
    world = lab_world(4, 100, 0, 8.0)
    training = begun(world, "2:exact", numbers=20_000_000)
    run(training, 2 + 2)
    ledger = training.ledger
    before = ledger.ahead
    # The next sum takes ten seconds; each member has eight units of a quarter of a second to go ahead with.
    world.clock.run_until(lambda: ledger.ahead == before + 4 * 5 + 1)
    training.die(2)
    run_on(training, 3)
    assert training.members == [0, 1, 3]
    assert ledger.once == 16 * covered(training)
    assert (ledger.lost, ledger.doubled) == (0, 0)
    assert ledger.computed - ledger.once - training.in_hand == 8 + 5  # those of the dead one, of both rounds


def test_loss_after_all_hold_the_result_costs_nothing() -> None:
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


@pytest.mark.parametrize("sync", ["exact", "4:exact", "4:int8", "2:exact"])
@pytest.mark.parametrize("seed", [1, 2])
def test_micro_batches_count_exactly_once_after_any_loss(seed: int, sync: str) -> None:
    world = homes(3, 3, seed=seed)
    training = begun(world, sync)
    churn = Churn(world, training, seed, life_s=120.0, away_s=10.0, state_bytes=1e6)
    run(training, 30)
    ledger = training.ledger
    assert (ledger.lost, ledger.doubled) == (0, 0)
    assert ledger.once == 16 * covered(training)
    assert churn.deaths > 2
    assert ledger.computed > ledger.once
    assert min(commit.members for commit in training.commits) < 9
    assert (ledger.ahead > 0) == (sync != "exact")


def slow_homes(seed: int) -> World:
    """Return homes whose messages take long: members receive them at different times, some never."""
    return homes(3, 2, seed=seed, speed=4.0, lines=Lines(up_mbps=(2.0, 20.0), delay_s=(0.05, 1.0)))


def test_deaths_at_every_moment_of_rounds_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups break before the sum, within it, while words are heard, and when only some have committed."""
    decisions: list[CommitDecision] = []

    def listening(words: Sequence[MemberState]) -> CommitDecision:
        decisions.append(decide_commit(words))
        return decisions[-1]

    monkeypatch.setattr(simulated, "decide_commit", listening)
    for seed in range(12):
        world = slow_homes(seed)
        training = begun(world, "2:exact")
        Churn(world, training, seed, life_s=60.0, away_s=8.0, state_bytes=1e5)
        run(training, 40)
        assert (training.ledger.lost, training.ledger.doubled) == (0, 0)
        assert training.ledger.once == 16 * covered(training)
    whys = " ".join(verdict.why for verdict in decisions)
    for what in ("applied by one worker", "every survivor holds", "is repeated"):
        assert what in whys
    repeated = [verdict for verdict in decisions if not verdict.apply and any(verdict.ahead)]
    assert repeated  # and some had gone ahead of what was repeated


def _others_are_not_asked(hand: StepProgress, verdict: CommitDecision, rank: int) -> None:
    """Wrong: what others have computed ahead would be dealt again."""
    hand.completed, hand.ahead = set(verdict.claimed[rank]), set(verdict.ahead[rank])


def _both_steps_are_one(hand: StepProgress, number: int) -> None:
    """Wrong: what is computed ahead is not of the step at hand."""
    hand.completed.add(number)
    hand.pending = [micro_batch for micro_batch in hand.pending if micro_batch.number != number]


@pytest.mark.parametrize(
    ("name", "wrong"), [("resume_from", _others_are_not_asked), ("add_microbatch", _both_steps_are_one)]
)
def test_wrong_rule_is_detected(
    name: str, wrong: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepProgress, name, wrong)
    world = slow_homes(1)
    training = begun(world, "2:exact")
    Churn(world, training, 1, life_s=60.0, away_s=8.0, state_bytes=1e5)
    with pytest.raises((RunError, ProtocolError, ValueError)):
        run(training, 60)


def test_equal_seeds_give_equal_trainings() -> None:
    def once() -> list[float]:
        world = homes(3, 4, seed=5)
        training = begun(world)
        Churn(world, training, 7, life_s=60.0, away_s=10.0, state_bytes=1e6)
        run(training, 12)
        return [commit.at for commit in training.commits]

    assert once() == once()


def test_shares_follow_speeds() -> None:
    world = lab_world(4, 1000, 0, 8.0)
    slow = begun(world._replace(speeds={0: 2.0, 1: 8.0, 2: 8.0, 3: 8.0}))
    run(slow, 4)
    assert slow.commits[0].seconds > 4.0  # every machine has a quarter, and one is slow
    assert slow.commits[-1].seconds == pytest.approx(32 / 26, rel=0.25)


def planned(*, overlaps: bool) -> Figures:
    world = lab_world(4, 200, 0, 8.0)
    training = begun(world, numbers=20_000_000)
    training.overlaps = overlaps
    model, profile = ModelSize(parameters=20_000_000), StepTimes(batch=32, unit=2)
    with chosen_while_training(training, model, profile, "auto", graph_of(world)):
        run(training, 200)
    assert training.commits[0].sync == Sync()
    return figures(training.commits, 1.0)


def test_session_planner_uses_local_sgd_on_slow_links() -> None:
    apart, together = planned(overlaps=False), planned(overlaps=True)
    assert apart.sync.is_local
    assert together.sync.is_local
    assert min(apart.utilisation, together.utilisation) > 0.9
    assert together.sync.period < apart.sync.period / 2  # shorter ones are enough if they overlap


def test_slow_machine_is_paused_and_micro_batches_count_once() -> None:
    world = lab_world(4, 50, 0, 8.0)._replace(speeds={0: 8.0, 1: 8.0, 2: 8.0, 3: 0.2})
    training = begun(world, numbers=20_000_000)
    model, profile = ModelSize(parameters=20_000_000), StepTimes(batch=32, unit=2)
    with chosen_while_training(training, model, profile, "auto", graph_of(world)):
        run(training, 200)
    assert training.commits[0].members == 4
    assert training.commits[-1].members == 3
    assert training.members == [0, 1, 2]
