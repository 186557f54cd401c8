"""While a round's sum is on its way, members train on: nothing is lost, doubled, or different for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from backyard.core.errors import CollectiveError
from backyard.training.pace import Pace
from backyard.training.rounds import Rounds
from backyard.training.sync import Sync
from tests.unit.training.test_rounds import SAMPLES, UNIT, Training
from tests.unit.training.together import Arriving, Seat, Table, together

SLOW_S = 0.15


@pytest.fixture(autouse=True)
def _equal_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "speed", lambda self: 1.0)


class SlowSeat(Seat):
    """Its line is slow; sums with these numbers break for everybody when they have left."""

    breaks_at: frozenset[int] = frozenset()

    def __init__(self, table: Table, rank: int) -> None:
        super().__init__(table, rank)
        self.sums = self.met = 0

    def begin_sum(self, tensor: torch.Tensor) -> Arriving:
        self.sums += 1
        if tensor.numel() > 10:
            time.sleep(SLOW_S)
        found = super().begin_sum(tensor)
        if self.sums in self.breaks_at:
            raise CollectiveError("a line is cut")
        return found

    def meet(self, broken: CollectiveError | None) -> None:
        self.met += 1


class Watched(Training):
    """Notes which units were computed of which step, and how far ahead of the commits."""

    def __init__(self, circle: Any, sync: Sync) -> None:
        self.units: list[tuple[int, int]] = []
        self.ahead = 0
        super().__init__(circle, sync)

    def train(self, epochs: int = 2) -> Watched:
        for _ in self.run.epochs(epochs):
            for x, y in self.batches:
                steps = self.run._steps
                assert self.run._current is not None
                self.units.append((steps.at[1], self.run._current.unit.number))
                self.ahead += steps.at[0] > steps.done
                torch.nn.functional.mse_loss(self.net(x), y).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
        return self


def _all_together(world: int, sync: Sync, breaks_at: Sequence[int] = ()) -> list[Watched]:
    kind = type("Seat", (SlowSeat,), {"breaks_at": frozenset(breaks_at)})
    return together(world, lambda seat: Watched(kind(seat._table, seat.rank), sync).train(3))


@pytest.mark.parametrize("codec", ["exact", "int8"])
@pytest.mark.parametrize("world", [2, 3])
def test_members_train_on_while_a_sum_travels(world: int, codec: str) -> None:
    members = _all_together(world, Sync(period=3, codec=codec, momentum=0.5))
    assert all(one.ahead > 10 for one in members)
    assert all(one.hashes == members[0].hashes for one in members)
    assert members[0].counts[-1] == 3 * 12
    _each_unit_once(members)


def _each_unit_once(members: Sequence[Watched]) -> None:
    every = sorted(unit for one in members for unit in one.units)
    assert len(every) == len(set(every))
    assert len(every) == 3 * SAMPLES // UNIT


@pytest.mark.parametrize("breaks_at", [(6,), (9,), (16, 18), (17, 19, 21)])
def test_a_sum_that_breaks_on_its_way_costs_no_work(
    breaks_at: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither that of its round nor what was done since; and all members hold the same again."""
    kept: list[float] = []
    turn_back = Rounds.turn_back

    def noted(rounds: Rounds, clip: float | None) -> None:
        turn_back(rounds, clip)
        kept.append(rounds._since_weight)

    monkeypatch.setattr(Rounds, "turn_back", noted)
    members = _all_together(2, Sync(period=2, momentum=0.5), breaks_at)
    assert len(kept) == 2 * len(breaks_at)
    assert max(kept) > 0, "somebody was ahead"
    assert members[0].hashes == members[1].hashes
    assert members[0].counts[-1] == 3 * 12
    _each_unit_once(members)


def test_it_learns_as_well() -> None:
    exact = _all_together(2, Sync())
    ahead = _all_together(2, Sync(period=3, rate=1.0, momentum=0.3))
    start = Training(Seat(Table(1), 0), Sync()).loss()
    assert ahead[0].loss() < start - 0.7 * (start - exact[0].loss())


def test_the_word_of_the_first_member_takes_effect_one_round_later() -> None:
    """By then everybody has it, also those who were ahead."""

    def member(seat: Seat) -> Watched:
        one = Watched(SlowSeat(seat._table, seat.rank), Sync(period=3))
        one.run._steps.on_commit.append(lambda: _wish(one))
        return one.train(3)

    members = together(2, member)
    assert members[0].hashes == members[1].hashes
    assert [one.run.sync for one in members] == [Sync(period=2, codec="bf16", inner=4)] * 2
    _each_unit_once(members)


def _wish(one: Watched) -> None:
    if one.run.done >= 12:
        one.run._steps.wanted = Sync(period=2, codec="bf16")


def test_a_script_that_ends_meanwhile_ends() -> None:
    ended = threading.Event()

    class Never(SlowSeat):
        def begin_sum(self, tensor: torch.Tensor) -> Arriving:
            if self.sums > 4 and tensor.numel() > 10:
                ended.wait(60)
                raise CollectiveError("it was aborted")
            return super().begin_sum(tensor)

        def abort(self) -> None:
            ended.set()

    def member(seat: Seat) -> int:
        one = Watched(Never(seat._table, seat.rank), Sync(period=3))
        for x, y in one.batches:
            torch.nn.functional.mse_loss(one.net(x), y).backward()
            one.optimizer.step()
            if one.run._steps._flight is not None and one.run._circle.sums > 4:  # type: ignore[attr-defined]
                one.run._steps.close()
                assert one.run._steps._flight.has_ended
                return one.run.done
        raise AssertionError("nothing was on its way")

    assert all(together(2, member))
