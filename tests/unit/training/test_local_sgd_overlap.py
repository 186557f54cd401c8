"""Overlap: workers train while a round's all-reduce is in flight, without losing or doubling work."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from barnraise.core.errors import CollectiveError, RunError
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.local_sgd import LocalSgd
from barnraise.training.steps.step_loop import StepLoop
from barnraise.training.steps.throughput import Throughput
from barnraise.training.sync import Sync
from tests.unit.training.flat_loop import microbatches
from tests.unit.training.test_local_sgd import BATCH, SAMPLES, UNIT, Training
from tests.unit.training.threaded_group import PendingCopy, SharedExchange, ThreadWorker, run_workers


@pytest.fixture(autouse=True)
def _equal_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Throughput, "speed", lambda self: 1.0)


@pytest.fixture(autouse=True)
def _signal_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set an event while a worker waits for the all-reduce in flight."""
    settle = StepLoop.wait_in_flight

    def signal_and_wait(steps: StepLoop) -> None:
        if isinstance(steps._manager, SlowWorker):
            steps._manager.is_awaited.set()
        settle(steps)
        if isinstance(steps._manager, SlowWorker):
            steps._manager.is_awaited.clear()

    monkeypatch.setattr(StepLoop, "wait_in_flight", signal_and_wait)


class SlowWorker(ThreadWorker):
    """Worker whose all-reduce completes only when it is waited for; given calls fail for all workers."""

    breaks_at: frozenset[int] = frozenset()

    def __init__(self, exchange: SharedExchange, rank: int) -> None:
        super().__init__(exchange, rank)
        self.sums = self.met = 0
        self.is_awaited = threading.Event()

    def all_reduce_async(self, tensor: torch.Tensor) -> PendingCopy:
        self.sums += 1
        if threading.current_thread().name == "barnraise-reduce":
            assert self.is_awaited.wait(60)
        pending = super().all_reduce_async(tensor)
        if self.sums in self.breaks_at:
            raise CollectiveError("a line is cut")
        return pending

    def join_next_group(self, error: CollectiveError | None) -> None:
        self.met += 1


class Watched(Training):
    """Training that records the micro-batches of each step, and how many were computed ahead."""

    def __init__(self, manager: Any, sync: Sync) -> None:
        self.units: list[tuple[int, int]] = []
        self.steps: list[int] = []  # after each iteration
        self.ahead = 0
        super().__init__(manager, sync)

    def train(self, epochs: int = 2) -> Watched:
        for _ in self.run.epochs(epochs):
            for batch in self.batches:
                for x, y in batch:
                    steps = self.run._step_loop
                    assert self.run._current is not None
                    self.units.append((steps.position[1], self.run._current.unit.number))
                    self.ahead += steps.position[0] > steps.done
                    torch.nn.functional.mse_loss(self.net(x), y).backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.scheduler.step()
                self.steps.append(self.run.step)
        return self


def _all_together(world: int, sync: Sync, breaks_at: Sequence[int] = ()) -> list[Watched]:
    kind = type("ThreadWorker", (SlowWorker,), {"breaks_at": frozenset(breaks_at)})
    return run_workers(world, lambda worker: Watched(kind(worker._exchange, worker.rank), sync).train(3))


@pytest.mark.parametrize("codec", ["exact", "int8"])
@pytest.mark.parametrize("world", [2, 3])
def test_workers_train_during_all_reduce(world: int, codec: str) -> None:
    members = _all_together(world, Sync(period=3, codec=codec, momentum=0.5))
    assert all(member.ahead > 10 for member in members)
    assert all(member.hashes == members[0].hashes for member in members)
    assert members[0].counts[-1] == 3 * 12
    _each_unit_once(members)


def _each_unit_once(members: Sequence[Watched]) -> None:
    every = sorted(unit for member in members for unit in member.units)
    assert len(every) == len(set(every))
    assert len(every) == 3 * SAMPLES // UNIT
    for member in members:
        assert member.steps == list(range(1, 3 * SAMPLES // BATCH + 1)), "one iteration for each step"


@pytest.mark.parametrize("breaks_at", [(6,), (9,), (16, 18), (17, 19, 21)])
def test_all_reduce_failing_in_flight_loses_no_work(
    breaks_at: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the round nor the work since is lost, and all workers hold the same state again."""
    kept: list[float] = []
    rollback_round = LocalSgd.rollback_round

    def noted(rounds: LocalSgd, clip: float | None) -> None:
        rollback_round(rounds, clip)
        kept.append(rounds._next_weight)

    monkeypatch.setattr(LocalSgd, "rollback_round", noted)
    members = _all_together(2, Sync(period=2, momentum=0.5), breaks_at)
    assert len(kept) == 2 * len(breaks_at)
    assert max(kept) > 0, "a worker was ahead"
    assert members[0].hashes == members[1].hashes
    assert members[0].counts[-1] == 3 * 12
    _each_unit_once(members)


def test_all_reduce_failing_within_microbatch_counts_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches are computed in parts, and the all-reduce ends between two parts."""
    weights: list[float] = []
    apply = LocalSgd.apply

    def noted(rounds: LocalSgd) -> None:
        weights.append(float(rounds._reducer.total_metadata[0]))
        apply(rounds)

    monkeypatch.setattr(LocalSgd, "apply", noted)
    kind = type("ThreadWorker", (SlowWorker,), {"breaks_at": frozenset((6, 9, 14))})

    class InParts(Watched):
        between = 0

        def train(self, epochs: int = 2) -> Watched:
            self.run._oom_guard.parts = 2
            step = self.optimizer.step

            def step_after_all_reduce(*given: Any) -> None:
                flight, piece = self.run._step_loop._in_flight, self.run._current
                if flight is not None and piece is not None and not piece.is_last:
                    self.run._manager.is_awaited.set()  # type: ignore[attr-defined]
                    flight.wait(60)
                    self.between += 1
                step(*given)

            step_after_all_reduce._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as torch looks for
            self.optimizer.step = step_after_all_reduce  # type: ignore[method-assign]
            return super().train(epochs)

    members = run_workers(
        2, lambda worker: InParts(kind(worker._exchange, worker.rank), Sync(period=2, momentum=0.5)).train(3)
    )
    assert all(member.between > 3 for member in members if isinstance(member, InParts))
    assert sum(weights) == 2 * (3 * SAMPLES - BATCH), "all but the first step, as both members sum it"
    assert set(weights) == {1.0 * BATCH, 2.0 * BATCH}
    assert members[0].hashes == members[1].hashes
    assert members[0].counts[-1] == 3 * 12


def test_microbatches_without_weight_change_nothing() -> None:
    alike = []
    for period in (1, 4):
        training = Training(SingleWorkerManager(), Sync(period=period), kind=torch.optim.AdamW)
        before = training.flat.clone()
        for x, y in microbatches(training.batches):
            training.run.weight(0.0)
            torch.nn.functional.mse_loss(training.net(x), y).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            break
        alike.append(torch.equal(before, training.flat))
    assert alike == [True, True]


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("light", [range(1, 60, 3), range(60)])
def test_nan_loss_without_weight_is_ignored(period: int, light: range) -> None:
    """Such is the mean over tokens if all labels of a micro-batch are ignored."""
    final_weights = []
    for factor in (float("nan"), 1.0):
        training = Training(SingleWorkerManager(), Sync(period=period), kind=torch.optim.AdamW)
        before, done = training.flat.clone(), 0
        for number, (x, y) in enumerate(microbatches(training.batches)):
            if number == 24:
                break
            is_light = number in light
            training.run.weight(0.0 if is_light else float(len(x)))
            loss = torch.nn.functional.mse_loss(training.net(x), y)
            (loss * factor if is_light else loss).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            done = training.run.done
        assert done > 1
        assert torch.equal(before, training.flat) == (len(light) == 60)
        final_weights.append(training.flat.clone())
    assert torch.equal(*final_weights)
    assert final_weights[0].isfinite().all()


def test_gather_within_microbatch_is_rejected() -> None:
    training = Training(SingleWorkerManager(), Sync(period=2))
    for x, y in microbatches(training.batches):
        torch.nn.functional.mse_loss(training.net(x), y).backward()
        with pytest.raises(RunError, match="within a batch"):
            training.run.gather(torch.zeros(1))
        training.optimizer.step()
        training.run.gather(torch.zeros(1))
        break


def test_overlap_keeps_at_most_two_model_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_counts: list[int] = []
    copy = LocalSgd._copy

    def noted(rounds: LocalSgd, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        copies = copy(rounds, tensors)
        held = (rounds._shadow, rounds._next_change, rounds._submitted, *rounds._free)
        copy_counts.append(1 + sum(bool(buffers) for buffers in held))
        return copies

    monkeypatch.setattr(LocalSgd, "_copy", noted)
    members = _all_together(2, Sync(period=2, momentum=0.5), (9, 16, 18))
    assert max(copy_counts) == 2
    assert all(len(member.run._step_loop._local_sgd._free) <= 2 for member in members)


def test_overlapped_training_learns_as_well() -> None:
    exact = _all_together(2, Sync())
    ahead = _all_together(2, Sync(period=3, rate=1.0, momentum=0.3))
    start = Training(ThreadWorker(SharedExchange(1), 0), Sync()).loss()
    assert ahead[0].loss() < start - 0.7 * (start - exact[0].loss())


def test_requested_sync_applies_one_round_later() -> None:
    """By then all workers know it, also those that were ahead."""

    def member(worker: ThreadWorker) -> Watched:
        training = Watched(SlowWorker(worker._exchange, worker.rank), Sync(period=3))
        training.run._step_loop.on_commit.append(lambda: _wish(training))
        return training.train(3)

    members = run_workers(2, member)
    assert members[0].hashes == members[1].hashes
    assert [training.run.sync for training in members] == [Sync(period=2, codec="bf16", inner=4)] * 2
    _each_unit_once(members)


def _wish(training: Watched) -> None:
    if training.run.done >= 12:
        training.run._step_loop.requested_sync = Sync(period=2, codec="bf16")


def test_script_ending_during_all_reduce_exits() -> None:
    class Never(SlowWorker):
        def __init__(self, exchange: SharedExchange, rank: int) -> None:
            super().__init__(exchange, rank)
            self._ended = threading.Event()

        def all_reduce_async(self, tensor: torch.Tensor) -> PendingCopy:
            if threading.current_thread().name == "barnraise-reduce":
                self._ended.wait(60)
                raise CollectiveError("it was aborted")
            return super().all_reduce_async(tensor)

        def abort(self) -> None:
            self._ended.set()

    def member(worker: ThreadWorker) -> int:
        training = Watched(Never(worker._exchange, worker.rank), Sync(period=3))
        for x, y in microbatches(training.batches):
            torch.nn.functional.mse_loss(training.net(x), y).backward()
            training.optimizer.step()
            if training.run._step_loop._in_flight is not None:
                training.run._step_loop.close()
                assert training.run._step_loop._in_flight.has_ended
                return training.run.done
        raise AssertionError("nothing was on its way")

    assert all(run_workers(2, member))
