"""A group breaks when some members have heard that all hold a step, and others have not."""

from __future__ import annotations

import threading

import pytest
import torch

from backyard.core.errors import CollectiveError
from backyard.training.pace import Pace
from backyard.training.sync import Sync
from tests.unit.training.test_rounds import Training
from tests.unit.training.together import Arriving, Seat, Table, together

SPEEDS = (100.0, 100.0, 1.0)


class HalfHeard(Seat):
    """The second member does not hear the words of some commits; then nobody hears a thing until all meet."""

    deaf_at = (7, 32)
    lost: dict[int, threading.Event] = {}  # noqa: RUF012  # by table

    def __init__(self, table: Table, rank: int) -> None:
        super().__init__(table, rank)
        self._is_lost = self.lost.setdefault(id(table), threading.Event())
        self.heard = self.met = 0

    def gather(self, word: bytes) -> list[bytes]:
        self._check()
        found = super().gather(word)
        self.heard += 1
        if self.rank == 1 and self.heard in self.deaf_at:
            self._is_lost.set()
            raise CollectiveError("a line is cut")
        return found

    def begin_sum(self, tensor: torch.Tensor) -> Arriving:
        self._check()
        return super().begin_sum(tensor)

    def _check(self) -> None:
        # All have left the last exchange, so they see the same.
        self._table.barrier.wait()
        if self._is_lost.is_set():
            raise CollectiveError("a member is gone")

    def meet(self, broken: CollectiveError | None) -> None:
        self.met += 1
        if broken is not None and self.rank == 1:
            self._table.barrier.wait()  # where the others learn of it
        self._table.barrier.wait()
        self._is_lost.clear()
        self._table.barrier.wait()


def test_all_go_on_with_the_same_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is too slow to get units, and is tried again after some commits: the same for all."""
    ranks = threading.local()
    monkeypatch.setattr(Pace, "speed", lambda self: SPEEDS[ranks.mine])

    def member(seat: Seat) -> Training:
        ranks.mine = seat.rank
        return Training(HalfHeard(seat._table, seat.rank), Sync()).train(5)

    members = together(3, member)
    assert members[0].run._circle.met == 1 + len(HalfHeard.deaf_at)  # type: ignore[attr-defined]
    assert members[0].hashes == members[1].hashes == members[2].hashes
    assert members[0].counts[-1] == 5 * 12
