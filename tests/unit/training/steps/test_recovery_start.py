"""Start of a group: rank 0's state is sent to workers with a different one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from barnraise.core.errors import CollectiveError
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from barnraise.training.steps.throughput import Throughput
from barnraise.training.sync import Sync
from tests.unit.training.test_local_sgd import Training
from tests.unit.training.threaded_group import PendingCopy, SharedExchange, ThreadWorker, run_workers

_sent: Counter[int] = Counter()  # how many numbers each rank received
_counting = threading.Lock()


class Counted(ThreadWorker):
    def send_async(self, tensor: torch.Tensor, to: int) -> PendingCopy:
        with _counting:
            _sent[to] += tensor.numel()
        return super().send_async(tensor, to)


@pytest.fixture(autouse=True)
def _equal_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Throughput, "speed", lambda self: 1.0)
    _sent.clear()


def _member(exchange: SharedExchange, rank: int, differs: int | None) -> Training:
    def optimizer(parameters: Iterator[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        given = list(parameters)
        if rank == differs:
            with torch.no_grad():
                given[0][-1, -1] += 1e-12
        return torch.optim.SGD(given, lr=lr)

    return Training(Counted(exchange, rank), Sync(), kind=optimizer).train()


def test_worker_with_same_state_receives_nothing() -> None:
    members = run_workers(3, lambda worker: _member(worker._exchange, worker.rank, None))
    assert not _sent
    assert members[0].hashes == members[1].hashes == members[2].hashes


def test_worker_with_one_different_number_receives_state() -> None:
    alike = run_workers(3, lambda worker: _member(worker._exchange, worker.rank, None))
    members = run_workers(3, lambda worker: _member(worker._exchange, worker.rank, 1))
    assert list(_sent) == [1]
    assert members[0].hashes == members[1].hashes == members[2].hashes == alike[0].hashes


class Growing(ThreadWorker):
    """Worker that trains alone until its group fails, and then with another one."""

    def __init__(self, later: SharedExchange) -> None:
        super().__init__(SharedExchange(1), 0)
        self._later, self._sums = later, 0

    def all_reduce_async(self, tensor: torch.Tensor) -> PendingCopy:
        self._sums += 1
        if self._sums == 4:
            raise CollectiveError("another worker joins")
        return super().all_reduce_async(tensor)

    def join_next_group(self, error: CollectiveError | None) -> None:
        if error is not None:
            self._exchange, self.world, self.generation = self._later, 2, 2  # type: ignore[misc]


def test_handover_is_announced_before_another_worker_trains() -> None:
    noted: list[tuple[int, int]] = []

    def member(worker: ThreadWorker) -> Training:
        training = Training(Growing(worker._exchange) if worker.rank == 0 else worker, Sync())
        training.run._step_loop.on_handover.append(lambda: noted.append((worker.rank, training.run.done)))
        return training.train(1)

    members = run_workers(2, member)
    assert [rank for rank, _ in noted] == [0]
    done = noted[0][1]
    assert members[1].counts[0] == done + 1 > 1
    assert members[0].hashes[done:] == members[1].hashes


class ShortMessages(ThreadWorker):
    """Worker whose group exchanges short messages only, as the groups of a run do."""

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        assert len(message) <= 4 << 20
        return super().all_gather_bytes(message)


class Remembered:
    """Notes of a framework."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def dump(self) -> bytes:
        return self.content

    def load(self, content: bytes) -> None:
        self.content = content


def test_long_notes_reach_workers_without_the_state() -> None:
    def member(worker: ThreadWorker) -> bytes:
        notes = Remembered(bytes([worker.rank]) * (5 << 20))
        run = Session(
            ShortMessages(worker._exchange, worker.rank),
            seed=0,
            unit=2,
            checkpoints=CheckpointManager(None, 60.0, 1),
        )
        run._notes = notes
        net = torch.nn.Linear(2, 1)
        loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=4)
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
        return notes.content

    assert run_workers(3, member) == [bytes(5 << 20)] * 3
