"""Orders of passes: the simulation with several runs of blocks, against the one that predicts steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.planning.split.split_problem import SplitMachine, SplitProblem
from barnraise.planning.split.stage_placement import ModelParts, PartSize
from barnraise.planning.split.stage_time import BlockSpeed, LinkRates, predict_split_step, stage_times
from benchmarks.bigger.homes import HOMES, SHAPES
from benchmarks.bigger.orders import (
    ORDERS,
    Case,
    Pass,
    cases,
    full_problem,
    gains_of,
    greedy_orders,
    todays_orders,
    with_moves,
)

SIZE = 100.0  # bytes of a message
ticks = st.integers(0, 5).map(float)
seconds = st.integers(1, 5).map(float)


def case_of(
    speeds: Sequence[BlockSpeed],
    *,
    counts: Sequence[int],
    batches: int = 8,
    send_s: float = 0.0,
    latency_s: float = 0.0,
    weights_share: float = 0.0,
) -> Case:
    """Return a pipeline of machines in their order, with one kind of line."""
    number = range(len(speeds))
    rate = SIZE / send_s if send_s else 0.0
    links = LinkRates(
        tuple(tuple(rate for _ in number) for _ in number),
        tuple(tuple(latency_s for _ in number) for _ in number),
    )
    blocks = sum(counts)
    parts = ModelParts(PartSize(0), (PartSize(1),) * blocks, PartSize(0))
    machines = tuple(SplitMachine(str(place), 1 << 40, speed) for place, speed in enumerate(speeds))
    problem = SplitProblem(parts, machines, links, batches, int(SIZE))
    return Case("case", problem, tuple(number), tuple(counts), weights_share, 0.0, 0.0)


@st.composite
def unlike_cases(draw: st.DrawFn) -> Case:
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    speeds = [BlockSpeed(draw(seconds), draw(seconds), draw(ticks), draw(ticks), draw(ticks)) for _ in counts]
    return case_of(
        speeds,
        counts=counts,
        batches=draw(st.integers(1, 9)),
        send_s=draw(ticks),
        latency_s=draw(ticks),
        weights_share=0.25,
    )


@settings(max_examples=150, deadline=None)
@given(unlike_cases())
def test_todays_orders_take_what_the_planner_predicts(case: Case) -> None:
    names = [machine.name for machine in case.problem.machines]
    ends = [sum(case.counts[: place + 1]) for place in range(len(case.counts))]
    runs = [(end - count, end) for end, count in zip(ends, case.counts, strict=True)]
    links, size = case.problem.links, case.problem.sent_bytes
    stages = stage_times(runs, case.order, names, case.problem.speeds, links, size)
    batches = case.problem.batches
    assert case.today(case.counts) == pytest.approx(predict_split_step(stages, batches).step_s)
    assert case.today(case.counts, math.inf) == pytest.approx(
        predict_split_step(stages, batches, "GPipe").step_s
    )


@settings(max_examples=40, deadline=None)
@given(unlike_cases())
def test_no_order_is_faster_than_its_slowest_machine(case: Case) -> None:
    chunks = case.chunks(case.counts, range(len(case.counts)))
    assert chunks is not None
    bound_s = case.problem.batches * max(
        chunk.forward_s + chunk.backward_s + chunk.weights_s for chunk in chunks
    )
    for name in ("GPipe", "zero-bubble"):
        assert case.best(case.counts, name, (2, math.inf)) >= bound_s * (1 - 1e-9)


def test_each_machine_computes_each_pass_of_its_chunks_once() -> None:
    case = case_of([BlockSpeed(1.0, 2.0)] * 3, counts=(4, 4, 4), weights_share=0.5)
    chunks = case.chunks(case.counts, [0, 1, 2, 2, 1, 0])
    assert chunks is not None
    assert [chunk.machine for chunk in chunks] == [0, 1, 2, 2, 1, 0]
    orders = greedy_orders(chunks, case.lines, 4, 2, is_split=True)
    for machine, order in orders.items():
        wanted = {
            Pass(kind, chunk, number)
            for kind in ("forward", "backward", "weights")
            for chunk in (machine, 5 - machine)
            for number in range(4)
        }
        assert len(order) == len(wanted)
        assert set(order) == wanted


def test_equal_machines_and_free_lines_give_the_known_times() -> None:
    """The start and the end of a step are as long as all other machines need for a micro-batch.

    Two runs of blocks on each machine halve that. Gradients of weights fill it, if they take as long.
    """
    machines, batches = 4, 8
    case = case_of([BlockSpeed(1.0, 2.0)] * machines, counts=(2,) * machines, batches=batches)
    work_s, edge_s = batches * 6.0, (machines - 1) * 6.0
    assert case.today(case.counts) == pytest.approx(work_s + edge_s)
    assert case.best(case.counts, "interleaved", (1, 2, 3, math.inf)) == pytest.approx(work_s + edge_s / 2)
    split = case._replace(weights_share=0.5)
    fastest = split.best(split.counts, "zero-bubble", (1, 2, 3, math.inf))
    assert work_s < fastest < work_s + edge_s / 2


def test_order_of_one_chunk_on_each_machine_alternates_after_it_has_run_ahead() -> None:
    orders = todays_orders([5, 3], 3)
    forward, backward = (
        [[Pass(kind, place, number) for number in range(3)] for place in range(2)]
        for kind in ("forward", "backward")
    )
    assert orders[5] == [*forward[0], *backward[0]]
    assert orders[3] == [each for pair in zip(forward[1], backward[1], strict=True) for each in pair]


def test_blocks_move_to_the_faster_machine_if_that_is_shorter() -> None:
    case = case_of([BlockSpeed(1.0, 2.0), BlockSpeed(2.0, 4.0)], counts=(3, 3))
    kept, moved = (with_moves(case, case.today, moves=moves) for moves in (False, True))
    assert moved < kept
    assert case.fits((4, 2))
    assert not case.fits((6, 0))


def test_quick_command_has_figures_for_each_case() -> None:
    """Today's step of a home is the one that the planner predicts."""
    known = list(cases())
    assert {case.name.rpartition(", ")[2] for case in known} == {"LoRA", "full"}
    step_s, gains = gains_of(known[0], moves=False)
    assert set(gains) == set(ORDERS)
    assert step_s >= known[0].bound_s
    whole = full_problem(HOMES[0], SHAPES[0])
    assert whole.parts.blocks[0].frozen_bytes == 0
    assert whole.speeds[0].backward_s == pytest.approx(3 * whole.speeds[0].forward_s)
