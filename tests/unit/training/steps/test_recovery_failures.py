"""Recovery when a group fails after only some workers have received all votes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from barnraise.checkpoint.serialization import FlatState, flatten
from barnraise.core.errors import CollectiveError, OperationMismatch, RunError, UnsupportedOperation
from barnraise.training.recovery.blocking_recovery import BlockingRecovery
from barnraise.training.steps.throughput import Throughput
from barnraise.training.sync import Sync
from tests.unit.training.test_local_sgd import Training
from tests.unit.training.threaded_group import PendingCopy, SharedExchange, ThreadWorker, run_workers

SPEEDS = (100.0, 100.0, 1.0)
NUMBERS = 64


class HalfHeard(ThreadWorker):
    """Worker whose rank 1 misses the votes of some commits; then the group fails for all."""

    deaf_at = (7, 32)
    lost: dict[int, threading.Event] = {}  # noqa: RUF012  # by exchange

    def __init__(self, exchange: SharedExchange, rank: int) -> None:
        super().__init__(exchange, rank)
        self._is_lost = self.lost.setdefault(id(exchange), threading.Event())
        self.heard = self.met = 0

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        self._check()
        messages = super().all_gather_bytes(message)
        self.heard += 1
        if self.rank == 1 and self.heard in self.deaf_at:
            self._is_lost.set()
            raise CollectiveError("a line is cut")
        return messages

    def all_reduce_async(self, tensor: torch.Tensor) -> PendingCopy:
        self._check()
        return super().all_reduce_async(tensor)

    def _check(self) -> None:
        # All have left the last exchange, so they see the same.
        self._exchange.barrier.wait()
        if self._is_lost.is_set():
            raise CollectiveError("a member is gone")

    def join_next_group(self, error: CollectiveError | None) -> None:
        self.met += 1
        if error is not None and self.rank == 1:
            self._exchange.barrier.wait()  # where the others learn of it
        self._exchange.barrier.wait()
        self._is_lost.clear()
        self._exchange.barrier.wait()


def test_workers_after_half_heard_votes_agree_on_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank is too slow for micro-batches and is retried after some commits, on all workers alike."""
    ranks = threading.local()
    monkeypatch.setattr(Throughput, "speed", lambda self: SPEEDS[ranks.mine])

    def member(worker: ThreadWorker) -> Training:
        ranks.mine = worker.rank
        return Training(HalfHeard(worker._exchange, worker.rank), Sync()).train(5)

    members = run_workers(3, member)
    assert members[0].run._manager.met == 1 + len(HalfHeard.deaf_at)  # type: ignore[attr-defined]
    assert members[0].hashes == members[1].hashes == members[2].hashes
    assert members[0].counts[-1] == 5 * 12


class Garbled(ThreadWorker):
    """Worker that receives damaged tensors at first."""

    def __init__(self, exchange: SharedExchange, rank: int, times: int) -> None:
        super().__init__(exchange, rank)
        self.damaged, self.times, self.met = 0, times, 0

    def receive_async(self, tensor: torch.Tensor, sender: int) -> PendingCopy:
        arriving = super().receive_async(tensor, sender)
        if tensor.numel() == 4 * NUMBERS and self.damaged < self.times:
            wait = arriving.wait

            def damage() -> None:
                wait()
                self.damaged += 1
                tensor[-1] += 1

            arriving.wait = damage  # type: ignore[method-assign]
        return arriving

    def join_next_group(self, error: CollectiveError | None) -> None:
        self.met += 1


class State:
    max_bytes = 1 << 20

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def flatten(self, done: int) -> FlatState:
        return flatten({"w": torch.arange(float(NUMBERS)) + self.rank, "done": done})


@pytest.mark.parametrize("times", [1, 9])
def test_damaged_state_is_sent_again_a_few_times(times: int) -> None:
    exchange, damaged = SharedExchange(2), [0]

    def member(rank: int) -> FlatState | None:
        worker = Garbled(exchange, rank, times)
        recovery = BlockingRecovery(worker, State(rank))  # type: ignore[arg-type]
        for _ in range(5):
            try:
                return recovery.transfer(5, (0,), (1,)) if rank else _given(recovery)
            except CollectiveError:
                damaged[0] += 1
        raise AssertionError("it is repeated without end")

    def _given(recovery: BlockingRecovery) -> None:
        for _ in range(min(times + 1, 3)):
            recovery.transfer(5, (0,), (1,))

    with ThreadPoolExecutor(2) as pool:
        giver, taker = pool.submit(member, 0), pool.submit(member, 1)
    assert giver.exception() is None
    if times == 1:
        state = taker.result()
        assert state is not None
        assert state.tensors[0].tolist() == list(range(NUMBERS))
        assert damaged == [1]
    else:
        with pytest.raises(RunError, match="3 times in a row"):
            taker.result()


class Unlike(ThreadWorker):
    """Worker whose operation fails with an error that the next group would raise, too."""

    def __init__(self, exchange: SharedExchange, rank: int, error: CollectiveError) -> None:
        super().__init__(exchange, rank)
        self._error = error
        self.met = 0

    def all_reduce_async(self, tensor: torch.Tensor) -> PendingCopy:
        raise self._error

    def join_next_group(self, error: CollectiveError | None) -> None:
        self.met += 1
        assert self.met < 5, "it is repeated"


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OperationMismatch("rank 1 sums 20 numbers and rank 0 sums 30"), "a stream must yield equally many"),
        (UnsupportedOperation("tensors on cuda", hint="Set staging to auto."), "Set staging to auto."),
    ],
)
@pytest.mark.parametrize("period", [1, 4])
def test_permanent_error_is_not_retried(error: CollectiveError, hint: str, period: int) -> None:
    def member(worker: ThreadWorker) -> Training:
        return Training(Unlike(worker._exchange, worker.rank, error), Sync(period=period)).train(2)

    with pytest.raises(RunError) as caught:
        run_workers(2, member)
    assert caught.value.message == error.message
    assert hint in caught.value.hint
