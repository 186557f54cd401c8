"""Healing beside training: stripes from all donors, results afterwards, and donors that die halfway."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import pytest
import torch

from barnraise.checkpoint.serialization import FlatState, flatten
from barnraise.core.errors import CollectiveError, PeerLost
from barnraise.training.recovery import state_transfer
from barnraise.training.recovery.live_recovery import CommittedStep, JoiningWorker, StateDonor


class Hall:
    """Rooms of one group, in one process. It breaks for all when somebody leaves too early."""

    def __init__(self, members: int, joinings: int = 1) -> None:
        self.world, self.members = members + joinings, members
        self.lines: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = {}
        self.barrier = threading.Barrier(self.world)
        self.words: dict[int, bytes] = {}
        self.broken = threading.Event()
        self.sent = [0] * self.world
        self.received = 0

    def line(self, sender: int, to: int) -> queue.SimpleQueue[torch.Tensor]:
        return self.lines.setdefault((sender, to), queue.SimpleQueue())

    def breaks(self) -> None:
        self.broken.set()
        self.barrier.abort()


class Done:
    def wait(self) -> None:
        return


class Coming:
    def __init__(self, hall: Hall, line: queue.SimpleQueue[torch.Tensor], tensor: torch.Tensor) -> None:
        self._hall, self._line, self._tensor = hall, line, tensor

    def wait(self) -> None:
        while True:
            try:
                self._tensor.copy_(self._line.get(timeout=0.02))
                self._hall.received += 1
                return
            except queue.Empty:
                if self._hall.broken.is_set():
                    raise PeerLost(0, "it is gone") from None


class Room:
    def __init__(self, hall: Hall, rank: int, dies_after: int | None = None) -> None:
        self.hall, self.rank, self.world, self.members = hall, rank, hall.world, hall.members
        self._dies_after = dies_after

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        try:
            self.hall.words[self.rank] = message
            self.hall.barrier.wait(90)
            said = [self.hall.words[rank] for rank in range(self.world)]
            self.hall.barrier.wait(90)
        except threading.BrokenBarrierError:
            raise PeerLost(0, "it is gone") from None
        return said

    def send_async(self, tensor: torch.Tensor, to: int) -> Done:
        if self._dies_after is not None and self.hall.sent[self.rank] >= self._dies_after:
            while self.hall.received < 8:  # two words, and some pieces
                time.sleep(0.001)
            self.hall.breaks()
        if self.hall.broken.is_set():
            raise PeerLost(0, "it is gone")
        self.hall.sent[self.rank] += 1
        self.hall.line(self.rank, to).put(tensor.clone())
        return Done()

    def receive_async(self, tensor: torch.Tensor, sender: int) -> Coming:
        return Coming(self.hall, self.hall.line(sender, self.rank), tensor)

    def close(self) -> None:
        return


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "_CHUNK", 1000)


def _state(step: int) -> FlatState:
    return flatten({"weights": torch.arange(5000.0) + step, "done": step})


class Follower:
    """A joining's state, and what it was told to do."""

    def __init__(self) -> None:
        self.joining = JoiningWorker()
        self.weights = torch.zeros(0)
        self.near = threading.Event()

    def load(self, parts: FlatState) -> int:
        self.weights = parts.tensors[0].clone()
        return int(self.weights[0])

    def apply(self, result: CommittedStep) -> None:
        self.weights += result.tensors[0].view(torch.float32)

    def recover(self, room: Room) -> None:
        self.joining.recover(room, 1 << 20, self.load, self.apply, self.near.set)


def _result(done: int) -> CommittedStep:
    return CommittedStep(done, 0, None, [torch.ones(5000)])


def _in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_stripes_come_from_all_and_results_follow() -> None:
    hall, follower = Hall(members=2), Follower()
    donors = [StateDonor(_state(7), 7) for _ in range(2)]
    for rank, donor in enumerate(donors):
        donor.start(lambda rank=rank: Room(hall, rank))  # type: ignore[misc]
    thread = _in_thread(lambda: follower.recover(Room(hall, 2)))
    assert follower.near.wait(90)
    assert follower.joining.stats is not None
    assert follower.joining.stats.donors == 2
    assert min(hall.sent[:2]) >= 10, "both sent about half of twenty pieces"
    for done in (8, 9, 10):
        for donor in donors:
            donor.note_commit(_result(done))
    for donor in donors:
        donor.finish()
    thread.join(90)
    assert not thread.is_alive()
    assert follower.joining.done == 10
    assert torch.equal(follower.weights, torch.arange(5000.0) + 10)


@pytest.mark.parametrize("dying", [0, 1])
def test_a_donor_that_dies_halfway_costs_only_its_stripe(dying: int) -> None:
    hall, follower = Hall(members=2), Follower()
    donors = [StateDonor(_state(3), 3) for _ in range(2)]
    for rank, donor in enumerate(donors):
        after = 8 if rank == dying else None
        donor.start(lambda rank=rank, after=after: Room(hall, rank, after))  # type: ignore[misc]
    with pytest.raises(CollectiveError):
        follower.recover(Room(hall, 2))
    had = len(follower.joining._received)
    assert had > 0
    left = donors[1 - dying]
    left.note_commit(_result(4))  # they went on meanwhile
    again = Hall(members=1)
    left.start(lambda: Room(again, 0))
    thread = _in_thread(lambda: follower.recover(Room(again, 1)))
    assert follower.near.wait(90)
    left.finish()
    thread.join(90)
    assert follower.joining.done == 4
    assert torch.equal(follower.weights, torch.arange(5000.0) + 4)
    resent = again.sent[0] - 2 * 4 - 20  # without the words, and the pieces of the result
    assert resent <= 20 - had, "what had come was not sent again"


def test_one_that_followed_already_goes_on_from_there() -> None:
    hall, follower = Hall(members=1), Follower()
    donor = StateDonor(_state(1), 1)
    donor.start(lambda: Room(hall, 0))
    thread = _in_thread(lambda: _until_broken(follower, Room(hall, 1)))
    assert follower.near.wait(90)
    donor.note_commit(_result(2))
    while follower.joining.done < 2:
        pass
    hall.breaks()
    thread.join(90)
    again = Hall(members=1)
    donor.note_commit(_result(3))
    donor.start(lambda: Room(again, 0))
    donor.finish()
    follower.recover(Room(again, 1))
    assert follower.joining.done == 3
    assert torch.equal(follower.weights, torch.arange(5000.0) + 3)
    assert again.sent[0] <= 20 + 2 * 3, "one result and three words"


def _until_broken(follower: Follower, room: Room) -> None:
    with pytest.raises(CollectiveError):
        follower.recover(room)
