"""Order of passes: each micro-batch once, few in flight, and transfers beside the computation."""

from __future__ import annotations

from itertools import accumulate

import pytest

from barnraise.training.pipeline.passes.order import ORDERS, Action, Order, actions_of

FORWARD_S, BACKWARD_S = 1.0, 2.0

Message = tuple[str, int, int]  # how it is received, where, and of which micro-batch


class Pipeline:
    """Stages that compute in given times.

    Sends do not block, and a transfer starts when both sides are there.
    """

    def __init__(self, stages: int, batches: int, order: Order, link_s: float) -> None:
        self._link_s = link_s
        self._actions = [actions_of(place, stages, batches, order) for place in range(stages)]
        self._clocks, self._next = [0.0] * stages, [0] * stages
        self._sent: dict[Message, float] = {}
        self._posted: dict[Message, float] = {}
        self._arrived: dict[Message, float] = {}
        self._free: dict[tuple[str, int], float] = {}  # when a direction of a link is free

    def run(self) -> float:
        """Return the seconds of a step."""
        before: object = None
        while before != (before := (tuple(self._next), len(self._arrived))):
            for place in range(len(self._actions)):
                while self._next[place] < len(self._actions[place]):
                    if not self._do(place, self._actions[place][self._next[place]]):
                        break
                    self._next[place] += 1
            self._transfer()
        assert self._next == list(map(len, self._actions)), "the stages wait for each other"
        return max(self._clocks)

    def _do(self, place: int, action: Action) -> bool:
        kind, batch = action
        if kind in ("RECV_F", "RECV_B"):
            self._posted[kind, place, batch] = self._clocks[place]
        elif kind == "SEND_F":
            self._sent["RECV_F", place + 1, batch] = self._clocks[place]
        elif kind == "SEND_B":
            self._sent["RECV_B", place - 1, batch] = self._clocks[place]
        else:
            needed = (f"RECV_{kind}", place, batch)
            is_end = place == (0 if kind == "F" else len(self._actions) - 1)
            if not is_end and needed not in self._arrived:
                assert needed in self._posted, "nothing is received for this pass"
                return False
            start = max(self._clocks[place], self._arrived.get(needed, 0.0))
            self._clocks[place] = start + (FORWARD_S if kind == "F" else BACKWARD_S)
        return True

    def _transfer(self) -> None:
        ready = self._sent.keys() & self._posted.keys() - self._arrived.keys()
        for message in sorted(ready, key=lambda each: self._sent[each]):
            link = message[:2]
            start = max(self._sent[message], self._posted[message], self._free.get(link, 0.0))
            self._arrived[message] = self._free[link] = start + self._link_s


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("batches", [1, 2, 4, 9])
def test_each_micro_batch_passes_each_stage_once(stages: int, batches: int, order: Order) -> None:
    for place in range(stages):
        actions = actions_of(place, stages, batches, order)
        assert [each.batch for each in actions if each.kind == "F"] == list(range(batches))
        assert [each.batch for each in actions if each.kind == "B"] == list(range(batches))
        change = {"F": 1, "B": -1}
        in_flight = list(accumulate(change.get(each.kind, 0) for each in actions))
        assert min(in_flight) >= 0
        if order == "1F1B":
            assert max(in_flight) <= min(batches, 2 * (stages - 1 - place) + 1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("batches", [1, 3, 8])
def test_stages_never_wait_for_each_other_in_a_circle(stages: int, batches: int, order: Order) -> None:
    for link_s in (0.0, 10.0):
        assert Pipeline(stages, batches, order, link_s).run() > 0


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_transfers_of_half_the_computation_cost_no_time_beside_it(stages: int) -> None:
    """A stage that waited for its transfers would add one or two of them to each micro-batch."""
    batches, compute_s = 32, FORWARD_S + BACKWARD_S
    link_s = compute_s / 2
    fill_s = (stages - 1) * (compute_s + 2 * link_s)
    assert Pipeline(stages, batches, "1F1B", link_s).run() <= batches * compute_s + fill_s
    assert Pipeline(stages, batches, "1F1B", 0.0).run() == pytest.approx((batches + stages - 1) * compute_s)
