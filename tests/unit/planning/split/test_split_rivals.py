"""Rivals of a split model: their prices, and which one is recommended."""

from __future__ import annotations

import itertools

import pytest

from barnraise.core.errors import RunError
from barnraise.planning.split.split_problem import SplitMachine, SplitProblem
from barnraise.planning.split.split_rivals import (
    Rival,
    RivalKind,
    price_rivals,
    price_split,
    recommend,
)
from barnraise.planning.split.stage_placement import ModelParts, PartSize
from barnraise.planning.split.stage_time import BlockSpeed, LinkRates

GIB = 1 << 30
GBIT = 1e9 / 8


def parts(blocks: int = 16, block_bytes: int = GIB) -> ModelParts:
    return ModelParts(PartSize(0), (PartSize(block_bytes, 1 << 20),) * blocks, PartSize(0), 1 << 24)


def mesh(count: int, rate: float, latency_s: float = 0.0) -> LinkRates:
    places = range(count)
    return LinkRates(
        tuple(tuple(rate for _ in places) for _ in places),
        tuple(tuple(0.0 if a == b else latency_s for b in places) for a in places),
    )


def machine(name: str, gib: float, block_s: float, host: float = 0.0, rate: float = 0.0) -> SplitMachine:
    speed = BlockSpeed(block_s / 3, 2 * block_s / 3)
    return SplitMachine(name, round(gib * GIB), speed, round(host * GIB), rate)


def problem(*machines: SplitMachine, rate: float = GBIT, batches: int = 8) -> SplitProblem:
    return SplitProblem(parts(), machines, mesh(len(machines), rate), batches, 1 << 24)


def by_kind(rivals: tuple[Rival, ...]) -> dict[RivalKind, Rival]:
    kinds = {rival.kind: rival for rival in rivals}
    assert len(kinds) == len(rivals)
    return kinds


def test_fast_machine_that_holds_the_model_makes_a_split_the_wrong_choice() -> None:
    fast = problem(machine("pc", 24, 0.01), machine("nas", 64, 0.2))
    rivals = by_kind(price_rivals(fast))
    assert rivals["alone"].step_s == pytest.approx(8 * 16 * 0.01)
    assert rivals["alone"].name == "pc alone"
    assert "memory" not in rivals
    split = price_split(fast, (0, 1))
    text = recommend(split, price_rivals(fast))
    assert text.startswith("A split is not the right choice here: pc alone takes 1.28 s for a step")


def test_equally_fast_machine_alone_is_preferred_because_it_is_simpler() -> None:
    alone = Rival("pc alone", "alone", 10.0, "")
    split = price_split(problem(machine("pc", 12, 0.1), machine("nas", 12, 0.1)), (0, 1))
    near = split._replace(step=split.step._replace(step_s=9.5))
    assert recommend(near, [alone]).endswith("and the split 9.5 s. It is simpler.")
    fewer = Rival("a split over pc and nas only", "fewer", 9.6, "")
    assert recommend(near, [fewer, alone]).startswith("A split is not the right choice here: pc alone")
    assert recommend(near, [fewer]).startswith("Leave machines out: a split over pc and nas only takes 9.6 s")
    memory = Rival("pc alone, with weights in its computer's memory", "memory", 3.0, "")
    assert recommend(near, [fewer, alone, memory]).startswith(
        "A split is not the right choice here: pc alone, with weights in its computer's memory takes 3 s"
    )
    far = split._replace(step=split.step._replace(step_s=5.0))
    assert recommend(far, [alone]) == (
        "The split is the right choice: 5 s for a step. The next best, pc alone, would take 10 s, "
        "2.0 times as long."
    )


def test_offload_reads_what_does_not_fit_once_per_pass() -> None:
    """About 5 GiB of 16 stay on the device; all micro-batches go through together."""
    pc = machine("pc", 12, 0.01, host=32, rate=10e9)
    rivals = by_kind(price_rivals(problem(pc, machine("nas", 12, 0.3))))
    assert rivals["alone"].step_s is None
    assert "it needs 16" in rivals["alone"].why
    memory, disk = rivals["memory"], rivals["disk"]
    assert memory.step_s is not None
    assert disk.step_s is not None
    fixed = 4 * 16 * (1 << 20) + 2 * GIB
    read = 16 * GIB - (12 * GIB - fixed - 8 * 36 * (1 << 24))
    compute = 8 * 16 * 0.01
    reading = read / 10e9
    assert memory.step_s == pytest.approx(max(compute / 3, reading) + max(2 * compute / 3, reading))
    assert disk.step_s == pytest.approx(2 * read / 3e9)
    assert "measured" in memory.why
    assert disk.why.startswith("it reads 2 times 10")
    assert disk.why.endswith("at 3 GB/s (assumed)")


def test_offload_on_a_fast_machine_is_priced_though_a_slow_one_holds_the_model() -> None:
    rivals = by_kind(price_rivals(problem(machine("pc", 12, 0.01, host=32), machine("nas", 64, 0.5))))
    assert rivals["alone"].name == "nas alone"
    assert rivals["memory"].name.startswith("pc alone")


def test_offload_to_memory_needs_that_memory() -> None:
    small = machine("pc", 12, 0.01, host=4)
    rivals = by_kind(price_rivals(problem(small, machine("nas", 12, 0.3))))
    assert rivals["memory"].step_s is None


def test_little_memory_makes_offload_read_in_several_passes() -> None:
    pc = machine("pc", 3, 0.01, host=64)  # room for one micro-batch beside two blocks
    rivals = by_kind(price_rivals(problem(pc, machine("nas", 24, 9.0))._replace(machines=(pc,))))
    assert rivals["memory"].why.startswith("it reads 16 times 15.6")


def test_sharded_parameters_pay_all_gathers_over_the_slowest_link() -> None:
    rivals = by_kind(price_rivals(problem(machine("a", 12, 0.01), machine("b", 12, 0.01))))
    sharded = rivals["sharded"]
    received = (2 * (16 * GIB + 16 * (1 << 20)) + 16 * (1 << 20)) / 2
    assert sharded.step_s == pytest.approx(received / GBIT)
    assert sharded.name == "FSDP2 over a and b"
    far = problem(machine("a", 12, 0.01), machine("b", 12, 0.01))._replace(links=mesh(2, GBIT, 0.5))
    assert by_kind(price_rivals(far))["sharded"].step_s == pytest.approx(received / GBIT + 2 * 16 * 0.5)
    slow = by_kind(price_rivals(problem(machine("a", 12, 9.0), machine("b", 12, 1.0))))["sharded"]
    assert slow.step_s == pytest.approx(4 * 16 * 9.0), "the slower machine computes half of the micro-batches"


def test_sharded_parameters_need_equal_shares_and_links() -> None:
    small = by_kind(price_rivals(problem(machine("a", 30, 0.01), machine("b", 4, 0.01))))["sharded"]
    assert small.step_s is None
    assert "and b has 4 GiB" in small.why
    unknown = problem(machine("a", 12, 0.1), machine("b", 12, 0.1), rate=0.0)
    assert by_kind(price_rivals(unknown))["sharded"].step_s is None


def test_ring_of_sharded_parameters_avoids_a_slow_link() -> None:
    machines = tuple(machine(name, 8, 0.01) for name in "abcd")
    rates = [[GBIT] * 4 for _ in range(4)]
    rates[0][1] = rates[1][0] = GBIT / 100
    links = LinkRates(tuple(map(tuple, rates)), mesh(4, 1.0).latencies)
    avoided = by_kind(price_rivals(SplitProblem(parts(), machines, links, 8, 1 << 24)))["sharded"]
    whole = by_kind(price_rivals(SplitProblem(parts(), machines, mesh(4, GBIT), 8, 1 << 24)))["sharded"]
    assert avoided.step_s == whole.step_s


def test_slow_machine_that_is_not_needed_gets_no_blocks() -> None:
    three = problem(machine("a", 12, 0.05), machine("b", 12, 0.05), machine("old", 12, 5.0))
    split = price_split(three, (0, 1, 2))
    assert sorted(split.machines) == [0, 1]
    assert split.why_spare[0].startswith("old computes no blocks, because a step is shorter without")
    assert "fewer" not in by_kind(price_rivals(three))


def test_fewer_machines_are_the_best_of_all_groups() -> None:
    machines = [machine(name, 9, seconds) for name, seconds in zip("abcd", (0.1, 0.4, 0.2, 0.3), strict=True)]
    four = problem(*machines)
    prices = []
    for size in (2, 3):
        for chosen in itertools.combinations(range(4), size):
            prices.append(price_split(four, chosen).step.step_s)
    assert by_kind(price_rivals(four))["fewer"].step_s == min(prices)


def test_model_that_fits_nowhere_is_said() -> None:
    tiny = problem(machine("a", 3, 0.1), machine("b", 3, 0.1))
    with pytest.raises(RunError, match="more than all have"):
        price_split(tiny, (0, 1))
    rivals = price_rivals(tiny)
    assert by_kind(rivals)["disk"].step_s is not None
    assert recommend(None, rivals).startswith(
        "A split over all machines is not possible here. A alone, with weights on its disk would take "
    )
    assert recommend(None, []) == "The model fits on none of these machines, nor on all of them together."


def test_split_without_any_speed_cannot_be_priced() -> None:
    unknown = problem(SplitMachine("a", 0), SplitMachine("b", 0))
    assert price_rivals(unknown) == ()
    with pytest.raises(RunError, match="no machine has measured a block"):
        price_split(unknown, (0, 1))


def test_only_way_is_called_so() -> None:
    split = price_split(problem(machine("a", 12, 0.1), machine("b", 12, 0.1)), (0, 1))
    assert recommend(split, []).startswith("The split is the only way on these machines: ")
