"""Predicted time of a step of a split model, against formulas and a simulation by small steps of time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.planning.plan.stage_placement import ModelParts, PartSize
from barnraise.planning.plan.stage_time import (
    BlockSpeed,
    LinkRates,
    StageOrder,
    StageTime,
    commit_seconds,
    predict_split_step,
    stage_times,
)

ORDERS: tuple[StageOrder, ...] = ("1F1B", "GPipe")
ticks = st.integers(0, 5)


@st.composite
def pipelines(draw: st.DrawFn) -> list[StageTime]:
    """Draw unlike stages, whose times are whole seconds."""
    count = draw(st.integers(1, 4))
    return [
        StageTime(str(place), draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(ticks), draw(ticks), 0.0)
        for place in range(count)
    ]


def passes(place: int, stages: int, batches: int, order: StageOrder) -> list[tuple[str, int]]:
    """Return the passes of a stage: in 1F1B a backward pass comes as soon as it may."""
    if order == "GPipe" or batches < stages:
        return [(kind, number) for kind in "FB" for number in range(batches)]
    done: list[tuple[str, int]] = []
    forward = backward = 0
    while backward < batches:
        if forward < batches and forward - backward < stages - place:
            done.append(("F", forward))
            forward += 1
        else:
            done.append(("B", backward))
            backward += 1
    return done


def simulate_seconds(stages: list[StageTime], batches: int, order: StageOrder) -> int:
    """Return the seconds of a step whose sends overlap, second by second."""
    count = len(stages)
    orders = [passes(place, count, batches, order) for place in range(count)]
    here = {("F", 0, number) for number in range(batches)}  # inputs that have arrived at a stage
    working: dict[int, tuple[int, tuple[str, int]]] = {}
    queues: dict[tuple[int, int], list[tuple[str, int]]] = {}
    moving: dict[tuple[int, int], int] = {}

    def settle(now: int) -> None:
        """Start and end all that starts and ends at this second."""
        changed = True
        while changed:
            changed = False
            for place in range(count):
                if place in working and working[place][0] == now:
                    kind, number = working.pop(place)[1]
                    target = place + (1 if kind == "F" else -1)
                    if kind == "F" and place == count - 1:
                        here.add(("B", place, number))
                    elif 0 <= target < count:
                        queues.setdefault((place, target), []).append((kind, number))
                    changed = True
                if (
                    place not in working
                    and orders[place]
                    and (orders[place][0][0], place, orders[place][0][1]) in here
                ):
                    current = orders[place].pop(0)
                    stage = stages[place]
                    seconds = stage.forward_s if current[0] == "F" else stage.backward_s
                    working[place] = (now + int(seconds), current)
                    changed = True
            for (sender, target), queue in queues.items():
                if (sender, target) in moving and moving[sender, target] == now:
                    del moving[sender, target]
                    kind, number = queue.pop(0)
                    here.add((kind, target, number))
                    changed = True
                if queue and (sender, target) not in moving:
                    link = stages[min(sender, target)]
                    moving[sender, target] = now + int(link.send_s if sender < target else link.return_s)
                    changed = True

    for now in itertools.count():
        settle(now)
        if not any(orders) and not working:
            return now
    raise AssertionError


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("stages", "batches"), [(1, 1), (2, 4), (3, 8), (4, 4)])
def test_equal_stages_without_transfers_take_the_known_time(
    order: StageOrder, stages: int, batches: int
) -> None:
    step = predict_split_step(
        [StageTime(str(place), 1.0, 2.0) for place in range(stages)], batches, order, 0.5
    )
    assert step.step_s == pytest.approx(3.0 * (batches + stages - 1) + 0.5)
    assert step.bound_s == pytest.approx(3.0 * batches)
    assert step.waiting_s == pytest.approx(3.0 * (stages - 1))
    assert step.busy_s == (3.0 * batches,) * stages


@settings(deadline=None, max_examples=60)
@given(pipelines(), st.integers(1, 6), st.sampled_from(ORDERS))
def test_prediction_equals_a_simulation_second_by_second(
    stages: list[StageTime], batches: int, order: StageOrder
) -> None:
    step = predict_split_step(stages, batches, order, overlaps=True)
    assert step.step_s == simulate_seconds(stages, batches, order)


@settings(deadline=None, max_examples=60)
@given(pipelines(), st.integers(1, 8), st.sampled_from(ORDERS), st.floats(0, 0.5))
def test_step_is_never_faster_than_its_bound_nor_with_waiting_sends(
    stages: list[StageTime], batches: int, order: StageOrder, latency_s: float
) -> None:
    far = [stage._replace(latency_s=latency_s) for stage in stages]
    overlapped = predict_split_step(far, batches, order, overlaps=True)
    waiting = predict_split_step(far, batches, order)
    assert overlapped.step_s >= overlapped.bound_s
    assert waiting.step_s >= overlapped.step_s - 1e-9
    slower = [far[0]._replace(backward_s=far[0].backward_s + 1), *far[1:]]
    assert predict_split_step(slower, batches, order).step_s >= waiting.step_s


def test_message_waits_for_its_receiver_unless_sends_overlap() -> None:
    """The first stage sends while the second one computes only if sends overlap."""
    stages = [StageTime("a", 1.0, 1.0, 2.0, 2.0), StageTime("b", 3.0, 3.0)]
    assert predict_split_step(stages, 8, overlaps=True).step_s == pytest.approx(54.0)
    # The second stage waits 2 s for each activation after the first one.
    assert predict_split_step(stages, 8).step_s == pytest.approx(54.0 + 7 * 2.0)


def test_reasons_name_what_limits_the_step() -> None:
    stages = [StageTime("mac", 0.1, 0.2, 0.01, 0.01), StageTime("nas", 0.2, 0.4)]
    step = predict_split_step(stages, 8, commit_s=0.25)
    assert step.limit == "nas"
    assert step.sentence.startswith("5.4")
    assert "nas computes longest, 4.8 s; nas waits " in step.sentence
    assert step.why[2] == "the exchange of gradients and the vote take 250 ms"
    assert step.step_s == pytest.approx(step.bound_s + step.waiting_s + step.commit_s)
    slow = predict_split_step([stages[0]._replace(return_s=1.5), stages[1]], 8)
    assert (slow.limit, slow.bound_s) == ("the link from nas to mac", 12.0)


def test_stages_take_the_parts_that_they_hold() -> None:
    speeds = [BlockSpeed(1.0, 2.0, 0.6, 3.0, 0.1), BlockSpeed(2.0, 4.0, 9.0, 6.0, 0.0)]
    links = LinkRates(((0.0, 100.0), (50.0, 0.0)), ((0.0, 0.01), (0.03, 0.0)))
    first, last = stage_times([(0, 3), (3, 4)], (1, 0), ("mac", "nas"), speeds, links, 200)
    assert (first.name, last.name) == ("nas", "mac")
    assert first[1:] == pytest.approx((9.0, 18.0, 4.0, 2.0, 0.03))
    assert last[1:] == pytest.approx((2.1, 4.0, 0.0, 0.0, 0.0))


def test_commit_takes_the_slowest_exchange_of_gradients() -> None:
    part = PartSize(0, 100)
    parts = ModelParts(PartSize(0), (part,) * 4, PartSize(0, 50), 10)
    links = LinkRates(((0.0, 100.0), (50.0, 0.0)), ((0.0, 0.1), (0.1, 0.0)))
    # 100 bytes at 100 a second, or 350 bytes at 50 a second; a vote; a round trip to prepare.
    assert commit_seconds(parts, [(0, 1), (1, 4)], (0, 1), links) == pytest.approx(7.1 + 0.2 + 0.2)
    assert commit_seconds(parts, [(0, 4)], (0,), links) == 0.0
