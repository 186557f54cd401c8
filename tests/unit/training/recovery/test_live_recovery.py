"""Live recovery: stripes from all donors, results afterwards, and donors that die halfway."""

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


class FakeGroup:
    """Shared memory of a recovery group; the group fails for all ranks when one of them leaves early."""

    def __init__(self, training_world: int, joinings: int = 1) -> None:
        self.world, self.training_world = training_world + joinings, training_world
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
    def __init__(self, group: FakeGroup, line: queue.SimpleQueue[torch.Tensor], tensor: torch.Tensor) -> None:
        self._group, self._line, self._tensor = group, line, tensor

    def wait(self) -> None:
        while True:
            try:
                self._tensor.copy_(self._line.get(timeout=0.02))
                self._group.received += 1
                return
            except queue.Empty:
                if self._group.broken.is_set():
                    raise PeerLost(0, "it is gone") from None


class FakeRank:
    def __init__(self, group: FakeGroup, rank: int, dies_after: int | None = None) -> None:
        self.group, self.rank, self.world, self.training_world = (
            group,
            rank,
            group.world,
            group.training_world,
        )
        self._dies_after = dies_after

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        try:
            self.group.words[self.rank] = message
            self.group.barrier.wait(90)
            messages = [self.group.words[rank] for rank in range(self.world)]
            self.group.barrier.wait(90)
        except threading.BrokenBarrierError:
            raise PeerLost(0, "it is gone") from None
        return messages

    def send_async(self, tensor: torch.Tensor, to: int) -> Done:
        if self._dies_after is not None and self.group.sent[self.rank] >= self._dies_after:
            while self.group.received < 8:  # two words, and some pieces
                time.sleep(0.001)
            self.group.breaks()
        if self.group.broken.is_set():
            raise PeerLost(0, "it is gone")
        self.group.sent[self.rank] += 1
        self.group.line(self.rank, to).put(tensor.clone())
        return Done()

    def receive_async(self, tensor: torch.Tensor, sender: int) -> Coming:
        return Coming(self.group, self.group.line(sender, self.rank), tensor)

    def close(self) -> None:
        return


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "_CHUNK", 1000)


def _state(step: int) -> FlatState:
    return flatten({"weights": torch.arange(5000.0) + step, "done": step})


class Follower:
    """State of a joining worker that records what was loaded and replayed."""

    def __init__(self) -> None:
        self.joining = JoiningWorker()
        self.weights = torch.zeros(0)
        self.near = threading.Event()

    def load(self, parts: FlatState) -> int:
        self.weights = parts.tensors[0].clone()
        return int(self.weights[0])

    def apply(self, result: CommittedStep) -> None:
        self.weights += result.tensors[0].view(torch.float32)

    def recover(self, rank: FakeRank) -> None:
        self.joining.recover(rank, 1 << 20, self.load, self.apply, self.near.set)


def _result(done: int) -> CommittedStep:
    return CommittedStep(done, 0, None, [torch.ones(5000)])


def _in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_stripes_from_all_donors_are_followed_by_results() -> None:
    group, follower = FakeGroup(training_world=2), Follower()
    donors = [StateDonor(_state(7), 7) for _ in range(2)]
    for rank, donor in enumerate(donors):
        donor.start(lambda rank=rank: FakeRank(group, rank))  # type: ignore[misc]
    thread = _in_thread(lambda: follower.recover(FakeRank(group, 2)))
    assert follower.near.wait(90)
    assert follower.joining.stats is not None
    assert follower.joining.stats.donors == 2
    assert min(group.sent[:2]) >= 10, "both sent about half of twenty pieces"
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
def test_donor_dying_halfway_costs_only_its_stripe(dying: int) -> None:
    group, follower = FakeGroup(training_world=2), Follower()
    donors = [StateDonor(_state(3), 3) for _ in range(2)]
    for rank, donor in enumerate(donors):
        after = 8 if rank == dying else None
        donor.start(lambda rank=rank, after=after: FakeRank(group, rank, after))  # type: ignore[misc]
    with pytest.raises(CollectiveError):
        follower.recover(FakeRank(group, 2))
    had = len(follower.joining._received)
    assert had > 0
    left = donors[1 - dying]
    left.note_commit(_result(4))  # they went on meanwhile
    again = FakeGroup(training_world=1)
    left.start(lambda: FakeRank(again, 0))
    thread = _in_thread(lambda: follower.recover(FakeRank(again, 1)))
    assert follower.near.wait(90)
    left.finish()
    thread.join(90)
    assert follower.joining.done == 4
    assert torch.equal(follower.weights, torch.arange(5000.0) + 4)
    resent = again.sent[0] - 2 * 4 - 20  # without the words, and the pieces of the result
    assert resent <= 20 - had, "what had come was not sent again"


def test_joining_worker_with_state_resumes_replay() -> None:
    group, follower = FakeGroup(training_world=1), Follower()
    donor = StateDonor(_state(1), 1)
    donor.start(lambda: FakeRank(group, 0))
    thread = _in_thread(lambda: _until_broken(follower, FakeRank(group, 1)))
    assert follower.near.wait(90)
    donor.note_commit(_result(2))
    while follower.joining.done < 2:
        pass
    group.breaks()
    thread.join(90)
    again = FakeGroup(training_world=1)
    donor.note_commit(_result(3))
    donor.start(lambda: FakeRank(again, 0))
    donor.finish()
    follower.recover(FakeRank(again, 1))
    assert follower.joining.done == 3
    assert torch.equal(follower.weights, torch.arange(5000.0) + 3)
    assert again.sent[0] <= 20 + 2 * 3, "one result and three words"


def _until_broken(follower: Follower, rank: FakeRank) -> None:
    with pytest.raises(CollectiveError):
        follower.recover(rank)
