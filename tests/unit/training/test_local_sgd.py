"""Rounds of local steps: commits, failed groups, joining workers, and codecs."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from barnraise.compression import FeedbackPart
from barnraise.core.errors import CollectiveError, ConfigError, RunError
from barnraise.training.gradients.compressed_reducer import CompressedReducer
from barnraise.training.group.interface import PendingWork
from barnraise.training.group.single import SingleWorkerGroup, SingleWorkerManager
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from barnraise.training.steps.throughput import Throughput
from barnraise.training.sync import SYNC_NUMBERS, Sync
from tests.unit.training.flat_loop import microbatches
from tests.unit.training.threaded_group import LoneWorker, ThreadWorker, run_workers

SAMPLES, BATCH, UNIT = 96, 8, 2
_DRAWING = threading.Lock()


def data() -> TensorDataset:
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 5, generator=stream, dtype=torch.float64)
    return TensorDataset(x, (x @ torch.arange(5.0, dtype=torch.float64)).tanh()[:, None])


@pytest.fixture(autouse=True)
def _equal_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make assignments independent of the load of this machine."""
    monkeypatch.setattr(Throughput, "speed", lambda self: 1.0)


class Training:
    """Training of one worker; all workers use the same seeds."""

    def __init__(self, manager: Any, sync: Sync, *, kind: Any = torch.optim.SGD, **more: Any) -> None:
        with _DRAWING:  # all threads share torch's generator
            torch.manual_seed(0)
            layers = torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        self.net = torch.nn.Sequential(*layers).double()
        self.optimizer = kind(self.net.parameters(), lr=0.05, **more)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.9)
        self.run = Session(
            manager, seed=3, unit=UNIT, checkpoints=CheckpointManager(None, 60.0, 1), sync=sync
        )
        self.hashes: list[str] = []
        self.counts: list[int] = []
        loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
        _, _, self.batches, _ = self.run.prepare(self.net, self.optimizer, loader, self.scheduler)
        self.run.on_commit(self._note)

    def _note(self, run: Session) -> None:
        self.hashes.append(run.state_digest())
        self.counts.append(run.done)

    def train(self, epochs: int = 2) -> Training:
        for _ in self.run.epochs(epochs):
            for x, y in microbatches(self.batches):
                torch.nn.functional.mse_loss(self.net(x), y).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
        return self

    def loss(self) -> float:
        x, y = data().tensors
        with torch.no_grad():
            return float(torch.nn.functional.mse_loss(self.net(x), y))

    @property
    def flat(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.net.parameters()])


def test_round_of_single_worker_equals_plain_steps() -> None:
    """One worker's change, applied with rate 1, equals its own progress."""
    exact = Training(SingleWorkerManager(), Sync(), kind=torch.optim.AdamW).train()
    rounds = Training(SingleWorkerManager(), Sync(period=4, rate=1.0), kind=torch.optim.AdamW)
    rounds.scheduler.gamma = exact.scheduler.gamma
    rounds.train()
    assert rounds.run.done == exact.run.done == 24
    assert len(rounds.counts) < 12
    # The scheduler moves at commits, so a few local steps had another rate.
    torch.testing.assert_close(rounds.flat, exact.flat, rtol=0, atol=0.02)


def test_workers_after_each_round_hold_same_state() -> None:
    members = run_workers(3, lambda worker: Training(worker, Sync(period=4, momentum=0.5)).train(4))
    assert members[0].hashes == members[1].hashes == members[2].hashes
    assert members[0].counts == members[1].counts
    assert members[0].counts[-1] == 4 * 12
    assert max(later - earlier for earlier, later in pairwise(members[0].counts)) == 4
    exact = Training(SingleWorkerManager(), Sync()).train(4)
    start = Training(SingleWorkerManager(), Sync()).loss()
    assert members[0].loss() < start - 0.5 * (start - exact.loss()), "it learns about as well"
    assert members[0].scheduler.last_epoch == exact.scheduler.last_epoch == 48


def test_samples_of_rounds_are_computed_once() -> None:
    seen: list[list[float]] = [[], [], []]

    def member(worker: ThreadWorker) -> None:
        training = Training(worker, Sync(period=5))
        for x, y in microbatches(training.batches):
            seen[worker.rank] += x[:, 0].tolist()
            torch.nn.functional.mse_loss(training.net(x), y).backward()
            training.optimizer.step()
            training.scheduler.step()

    run_workers(3, member)
    assert sorted(value for part in seen for value in part) == sorted(data().tensors[0][:, 0].tolist())


class Breaking(LoneWorker):
    """Worker whose all-reduce fails at given calls, and which regroups at once."""

    def __init__(self, at: set[int]) -> None:
        super().__init__()
        self.sums, self.met, self._at = 0, 0, at

    def all_reduce_async(self, tensor: torch.Tensor) -> PendingWork:
        self.sums += 1
        if self.sums in self._at:
            raise CollectiveError("a member is gone")
        return super().all_reduce_async(tensor)

    def join_next_group(self, error: CollectiveError | None) -> None:
        self.met += 1


def test_round_after_failed_group_keeps_progress() -> None:
    sync = Sync(period=4, momentum=0.3)
    calm = Training(SingleWorkerManager(), sync, kind=torch.optim.AdamW).train()
    broken = Breaking({6, 10, 11, 15})
    other = Training(broken, sync, kind=torch.optim.AdamW).train()
    assert broken.met == 1 + 4
    assert other.counts == calm.counts
    torch.testing.assert_close(other.flat, calm.flat, rtol=0, atol=1e-12)


def test_state_within_round_is_committed_state() -> None:
    training = Training(SingleWorkerManager(), Sync(period=6, inner=BATCH))
    for x, y in microbatches(training.batches):
        torch.nn.functional.mse_loss(training.net(x), y).backward()
        training.optimizer.step()
        if (
            training.run.sync.is_local and len(training.run._step_loop._progress.completed) == 8
        ):  # in the middle of a round
            here = training.flat.clone()
            assert training.run.state_digest() == training.hashes[-1]
            with training.run._step_loop.committed():
                assert not torch.equal(training.flat, here), "that was its own progress"
            assert torch.equal(training.flat, here)
            return
    raise AssertionError("no round was seen")


def test_joining_worker_loads_sync_with_state() -> None:
    old = Training(SingleWorkerManager(), Sync(period=4, momentum=0.5), kind=torch.optim.AdamW).train(1)
    new = Training(SingleWorkerManager(), Sync(), kind=torch.optim.AdamW)
    new.run._step_loop.done = new.run._state.load(old.run._state.flatten(old.run._step_loop.done))
    assert new.run._state.sync == old.run._state.sync
    assert new.run.state_digest() == old.run.state_digest()
    assert new.optimizer.param_groups[0]["lr"] == old.optimizer.param_groups[0]["lr"]
    assert not new.optimizer.state, "what an optimizer remembers in rounds is a member's own"
    assert new.run._state.outer is not None


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "topk"])
def test_compressed_rounds_lose_little_accuracy(codec: str) -> None:
    sync = Sync(period=4, codec=codec, decay=0.95 if codec == "topk" else 1.0)
    members = run_workers(2, lambda worker: Training(worker, sync).train(6))
    assert members[0].hashes == members[1].hashes
    exact = run_workers(2, lambda worker: Training(worker, Sync(period=4)).train(6))[0]
    start = Training(SingleWorkerManager(), Sync()).loss()
    kept = (start - members[0].loss()) / (start - exact.loss())
    assert kept > (0.5 if codec == "topk" else 0.97), kept


def test_compressed_steps_stay_close_to_exact() -> None:
    members = run_workers(2, lambda worker: Training(worker, Sync(codec="int8")).train(2))
    assert members[0].hashes == members[1].hashes
    exact = Training(SingleWorkerManager(), Sync()).train(2)
    torch.testing.assert_close(members[0].flat, exact.flat, rtol=0, atol=5e-3)
    assert not torch.equal(members[0].flat, exact.flat)


def test_residuals_in_checkpoint_are_restored() -> None:
    """The sum over all workers is restored on one of them: nothing is lost or doubled."""

    def member(worker: ThreadWorker) -> tuple[Training, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        training = Training(worker, Sync(period=3, codec="int8")).train(2)
        steps = training.run._step_loop
        own = steps._compression._feedback.state_dict()["residuals"]
        return training, own, steps._compression.sum_residuals(worker, [[FeedbackPart("sum-0", (57,))]])

    (first, first_residuals, pooled), (_, second_residuals, same) = run_workers(2, member)
    assert torch.equal(pooled["sum-0"], same["sum-0"])
    divisor = first.run._step_loop._compression._residual_divisor
    assert divisor > 1
    torch.testing.assert_close(
        divisor * pooled["sum-0"], first_residuals["sum-0"] + second_residuals["sum-0"]
    )
    assert float(pooled["sum-0"].abs().max()) > 0
    first.run._state.residuals = pooled
    saved = first.run._state.flatten(first.run._step_loop.done)
    again = Training(SingleWorkerManager(), Sync(period=3, codec="int8"))
    again.run._state.load(saved)
    again.run._step_loop._compression.load_residuals(again.run._state.residuals)
    restored = again.run._step_loop._compression._feedback.state_dict()["residuals"]
    assert torch.equal(restored["sum-0"], pooled["sum-0"])


def test_residual_of_long_round_is_scaled_for_short_round() -> None:
    """An epoch ends with a short round, whose divisor is small."""
    torch.manual_seed(0)
    change = torch.randn(200)
    sync, parts = Sync(period=32, codec="int4"), [[FeedbackPart("0", (200,))]]

    def member(worker: ThreadWorker) -> tuple[torch.Tensor, torch.Tensor]:
        compression, means = CompressedReducer(), []
        for weight, own_change in ((16.0, change), (0.5, torch.zeros(200))):
            total = torch.zeros(200)
            compression.all_reduce(
                worker, sync, len(means), [(weight * own_change, total)], parts, 2 * weight
            )
            compression.commit()
            means.append(total / (2 * weight))
        return means[0], means[1]

    for first, second in run_workers(2, member):
        lost = change - first
        assert float(lost.abs().max()) > 0.05
        assert float(second.abs().max()) <= 1.01 * float(lost.abs().max())
        assert float((lost - second).norm()) < 0.3 * float(lost.norm())


def test_residual_of_single_worker_is_added_once() -> None:
    sync, parts, own_change = (
        Sync(period=4, codec="int4"),
        [[FeedbackPart("0", (50,))]],
        torch.linspace(-1, 1, 50),
    )
    compression = CompressedReducer()
    compression.load_residuals({"0": torch.full((50,), 0.25)})  # of a mean
    for expected in (4 * own_change + 1.0, 4 * own_change):
        total = torch.zeros(50)
        compression.all_reduce(SingleWorkerGroup(), sync, 0, [(4 * own_change, total)], parts, 4.0)
        compression.commit()
        torch.testing.assert_close(total, expected)


def test_return_to_exact_steps_makes_workers_equal() -> None:
    """Optimizer memory differs after rounds, so all workers drop it at the same commit."""

    def member(worker: ThreadWorker) -> Training:
        training = Training(worker, Sync(period=3), kind=torch.optim.AdamW).train(2)
        training.run._step_loop.requested_sync = Sync()
        return training.train(4)

    members = run_workers(2, member)
    assert members[0].hashes == members[1].hashes
    assert members[0].run._state.sync == Sync()
    assert members[0].counts[-1] == 48


def test_sync_as_tensor_round_trips() -> None:
    for sync in (Sync(), Sync(period=12, codec="int4", inner=7, rate=0.5, momentum=0.9, decay=0.95)):
        assert len(sync.to_tensor()) == SYNC_NUMBERS
        assert Sync.from_tensor(sync.to_tensor()) == sync
    assert Sync.from_tensor(torch.zeros(SYNC_NUMBERS)) is None
    for nonsense in (float("nan"), float("inf"), -1.0, 1e12):
        assert Sync.from_tensor(torch.full((SYNC_NUMBERS,), nonsense)) is None


@pytest.mark.parametrize("bad", [{"codec": "mp3"}, {"period": 0}, {"rate": 0.0}, {"momentum": 1.0}])
def test_sync_with_invalid_values_is_rejected_with_hint(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Sync(**bad)
    assert "Use" in caught.value.hint


def test_local_steps_with_grad_scaler_are_rejected() -> None:
    net = torch.nn.Linear(5, 1).double()
    run = Session(
        SingleWorkerManager(),
        seed=0,
        unit=2,
        checkpoints=CheckpointManager(None, 60.0, 1),
        sync=Sync(period=2),
    )
    loader = DataLoader(data(), batch_size=8)
    with pytest.raises(RunError, match="GradScaler") as caught:
        run.prepare(net, torch.optim.SGD(net.parameters(), 0.1), loader, torch.amp.GradScaler("cpu"))
    assert "bfloat16" in caught.value.hint


def test_short_last_batch_keeps_size_of_local_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.training.test_local_sgd.SAMPLES", 91)
    inner: set[int] = set()

    def member(worker: ThreadWorker) -> None:
        training = Training(worker, Sync(period=5))
        training.run.on_commit(lambda run: inner.add(run.sync.inner))
        training.train(3)

    run_workers(2, member)
    assert inner == {BATCH // 2}


def test_residuals_of_rounds_are_dropped_for_exact_steps() -> None:
    def member(worker: ThreadWorker) -> Training:
        training = Training(worker, Sync(period=3, codec="int4"))
        training.run._step_loop.on_commit.append(lambda: _go_back(training))
        return training.train(2)

    members = run_workers(2, member)
    assert [training.run.sync for training in members] == [Sync(codec="exact")] * 2
    assert members[0].hashes == members[1].hashes
    for training in members:
        assert not training.run._step_loop._compression._feedback.state_dict()["residuals"]


def _go_back(training: Training) -> None:
    if training.run.done > 10:
        training.run._step_loop.requested_sync = Sync()
