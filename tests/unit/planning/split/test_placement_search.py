"""Search of the stages with the shortest step, against all that exist."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from barnraise.planning.split.placement_search import find_stages
from barnraise.planning.split.split_problem import SplitMachine, SplitProblem
from barnraise.planning.split.stage_placement import ModelParts, PartSize, stage_bytes
from barnraise.planning.split.stage_time import BlockSpeed, LinkRates

GIB = 1 << 30
MIB = 1 << 20


def random_problem(seed: int, machines: int, blocks: int) -> SplitProblem:
    """Return unlike machines, of which some have little memory, and unlike links."""
    source = random.Random(seed)
    parts = ModelParts(
        PartSize(source.choice([0, GIB // 2])),
        tuple(PartSize(source.randint(GIB // 2, GIB), MIB, source.choice([0, MIB])) for _ in range(blocks)),
        PartSize(GIB // 4, source.choice([0, MIB])),
        4 * MIB,
    )
    chosen = []
    for number in range(machines):
        block_s = source.uniform(0.05, 0.5)
        speed = BlockSpeed(block_s / 3, 2 * block_s / 3, source.uniform(0, 0.1), source.uniform(0, 0.2), 0.01)
        memory = source.choice([0, int(source.uniform(0.5, blocks) * GIB)])
        chosen.append(SplitMachine(f"m{number}", memory, speed))

    def table(lowest: float, highest: float) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(0.0 if a == b else source.uniform(lowest, highest) for b in range(machines))
            for a in range(machines)
        )

    links = LinkRates(table(1e7, 1e9), table(0.0, 0.01))
    return SplitProblem(parts, tuple(chosen), links, 4, parts.boundary_bytes)


def shortest_of_all(problem: SplitProblem) -> float:
    """Return the shortest estimate of all orders and cuts that fit into memory."""
    count, links, size = len(problem.parts.blocks), problem.links, problem.parts.boundary_bytes
    best = math.inf
    for stages in range(1, min(len(problem.machines), count) + 1):
        for order in itertools.permutations(range(len(problem.machines)), stages):
            for cuts in itertools.combinations(range(1, count), stages - 1):
                runs = list(itertools.pairwise((0, *cuts, count)))
                sum_s = most_s = 0.0
                for place, (machine, (first, end)) in enumerate(zip(order, runs, strict=True)):
                    need = stage_bytes(
                        problem.parts, first, end, stages=stages, place=place, batches=problem.batches
                    )
                    if need > (problem.machines[machine].memory_bytes or math.inf):
                        break
                    stage_s = sum(problem.speeds[machine].passes(first, end, count))
                    sum_s, most_s = sum_s + stage_s, max(most_s, stage_s)
                else:
                    for a, b in itertools.pairwise(order):
                        there, back = links.transfer_s(a, b, size), links.transfer_s(b, a, size)
                        sum_s += there + back + links.latencies[a][b] + links.latencies[b][a]
                        most_s = max(most_s, there, back)
                    best = min(best, sum_s + (problem.batches - 1) * most_s)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_no_order_and_no_cut_is_clearly_shorter(seed: int) -> None:
    problem = random_problem(seed, 4, 6)
    candidates = find_stages(problem)
    best = shortest_of_all(problem)
    assert bool(candidates) == (best < math.inf)
    if candidates:
        assert best * (1 - 1e-9) <= candidates[0].estimate_s <= best * 1.01
        assert candidates[0].runs[0][0] == 0
        assert candidates[0].runs[-1][1] == 6
        assert all(end == first for (_, end), (first, _) in itertools.pairwise(candidates[0].runs))


def no_links(machines: int) -> LinkRates:
    return LinkRates(((0.0,) * machines,) * machines, ((0.0,) * machines,) * machines)


def test_small_machine_is_not_at_an_end_that_it_cannot_hold() -> None:
    """The embeddings and the head fit on the large machines only, and the small one is needed between."""
    block, end = PartSize(GIB), PartSize(4 * GIB)
    parts = ModelParts(end, (block,) * 6, end)
    machines = tuple(SplitMachine(name, gib * GIB) for name, gib in (("box", 2), ("mac", 6), ("pc", 6)))
    [candidates] = find_stages(SplitProblem(parts, machines, no_links(3), 4, 0))
    assert candidates.order in ((1, 0, 2), (2, 0, 1))
    assert [last - first for first, last in candidates.runs] == [2, 2, 2]


def test_model_that_does_not_fit_gives_nothing() -> None:
    parts = ModelParts(PartSize(0), (PartSize(GIB),) * 4, PartSize(0))
    machines = (SplitMachine("a", GIB), SplitMachine("b", GIB))
    assert find_stages(SplitProblem(parts, machines, no_links(2), 4, 0)) == []


def test_machines_that_are_alike_keep_their_order() -> None:
    parts = ModelParts(PartSize(0), (PartSize(GIB),) * 12, PartSize(0))
    machines = tuple(SplitMachine(str(number), 4 * GIB) for number in range(4))
    candidates = find_stages(SplitProblem(parts, machines, no_links(4), 8, 0))
    assert candidates[0].order == (0, 1, 2, 3)


@pytest.mark.parametrize(("machines", "blocks"), [(8, 32), (16, 40)])
def test_many_machines_are_searched_too(machines: int, blocks: int) -> None:
    """With more than eight, all are still considered, and the result is as good as with eight of them."""
    problem = random_problem(3, machines, blocks)
    candidates = find_stages(problem)
    assert candidates[0].estimate_s <= 1.01 * find_stages(problem.only(range(8)))[0].estimate_s
