"""Predicted time of a step of a split model, against formulas and a simulation by small steps of time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.planning.split.stage_placement import ModelParts, PartSize
from barnraise.planning.split.stage_time import (
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
    """Return the passes of a stage whose transfers overlap with them."""
    if order == "GPipe":
        return [(kind, number) for kind in "FB" for number in range(batches)]
    done: list[tuple[str, int]] = []
    forward = backward = 0
    while backward < batches:
        if forward < batches and forward - backward < 2 * (stages - 1 - place) + 1:
            done.append(("F", forward))
            forward += 1
        else:
            done.append(("B", backward))
            backward += 1
    return done


class Seconds:
    """A pipeline that is simulated second by second. Receives are posted two passes early."""

    def __init__(self, stages: list[StageTime], batches: int, order: StageOrder) -> None:
        self._stages, count = stages, len(stages)
        self._passes = [passes(place, count, batches, order) for place in range(count)]
        self._done = [0] * count  # passes of each stage
        self._ends = [-1] * count  # when the present pass ends; -1 if the stage waits
        self._ready = {("F", 0, number) for number in range(batches)}  # inputs that have arrived
        self._queues: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self._moving: dict[tuple[int, int], int] = {}

    def run(self) -> int:
        """Return the seconds of a step."""
        for now in itertools.count():
            while self._finish_passes(now) or self._start_passes(now) or self._move(now):
                pass
            if all(done == len(order) for done, order in zip(self._done, self._passes, strict=True)):
                return now
        raise AssertionError

    def _finish_passes(self, now: int) -> bool:
        last, changed = len(self._stages) - 1, False
        for place, end in enumerate(self._ends):
            if end == now:
                kind, number = self._passes[place][self._done[place]]
                self._done[place] += 1
                self._ends[place], changed = -1, True
                target = place + (1 if kind == "F" else -1)
                if kind == "F" and place == last:
                    self._ready.add(("B", place, number))
                elif 0 <= target <= last:
                    self._queues.setdefault((place, target), []).append((kind, number))
        return changed

    def _start_passes(self, now: int) -> bool:
        changed = False
        for place, stage in enumerate(self._stages):
            if self._ends[place] < 0 and self._done[place] < len(self._passes[place]):
                kind, number = self._passes[place][self._done[place]]
                if (kind, place, number) in self._ready:
                    self._ends[place] = now + int(stage.forward_s if kind == "F" else stage.backward_s)
                    changed = True
        return changed

    def _move(self, now: int) -> bool:
        changed = False
        for ends, queue in self._queues.items():
            sender, target = ends
            if self._moving.get(ends) == now:
                kind, number = queue.pop(0)
                self._ready.add((kind, target, number))
                del self._moving[ends]
                changed = True
            is_free = bool(queue) and ends not in self._moving
            if is_free and self._passes[target].index(queue[0]) <= self._done[target] + 2:
                link = self._stages[min(ends)]
                self._moving[ends] = now + int(link.send_s if sender < target else link.return_s)
                changed = True
        return changed


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
    step = predict_split_step(stages, batches, order)
    assert step.step_s == Seconds(stages, batches, order).run()


@settings(deadline=None, max_examples=60)
@given(pipelines(), st.integers(1, 8), st.sampled_from(ORDERS), st.floats(0, 0.5))
def test_step_is_never_faster_than_its_bound_nor_than_with_faster_parts(
    stages: list[StageTime], batches: int, order: StageOrder, latency_s: float
) -> None:
    near = predict_split_step(stages, batches, order)
    assert near.step_s >= near.bound_s
    far = [stage._replace(latency_s=latency_s) for stage in stages]
    assert predict_split_step(far, batches, order).step_s >= near.step_s - 1e-9
    slower = [stages[0]._replace(backward_s=stages[0].backward_s + 1), *stages[1:]]
    assert predict_split_step(slower, batches, order).step_s >= near.step_s


def test_transfers_of_half_the_computation_cost_no_time_beside_it() -> None:
    stages = [StageTime(str(place), 1.0, 2.0, 1.5, 1.5) for place in range(3)]
    step = predict_split_step(stages, 32)
    assert step.step_s <= 32 * 3.0 + 2 * (3.0 + 2 * 1.5)
    assert step.limit == "0"


def test_reasons_name_what_limits_the_step() -> None:
    stages = [StageTime("mac", 0.1, 0.2, 0.01, 0.01), StageTime("nas", 0.2, 0.4)]
    step = predict_split_step(stages, 8, commit_s=0.25)
    assert step.limit == "nas"
    assert step.sentence.startswith("5.37 s for a step; ")
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
    alone = LinkRates(((0.0,),), ((0.0,),))
    assert commit_seconds(parts, [(0, 4)], (0,), alone) == 0.0
    assert commit_seconds(parts, [(0, 4)], (0,), links) > 0.0, "another machine mirrors"
    assert commit_seconds(parts, [(0, 1), (1, 4)], (0, 1), links, has_mirrors=False) == pytest.approx(0.4)
