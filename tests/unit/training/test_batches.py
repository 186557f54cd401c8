"""The script's loop: one iteration is one step, on every worker, also if the group fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import barnraise
from barnraise.core.errors import RunError
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.sync import Sync
from tests.unit.training.test_local_sgd import BATCH, SAMPLES, Training
from tests.unit.training.threaded_group import run_workers

EPOCHS, STEPS = 3, SAMPLES // BATCH


class Counted(Training):
    """Training that notes ``run.step`` after each iteration, by epoch."""

    def train(self, epochs: int = EPOCHS) -> Counted:
        self.steps: list[list[int]] = []
        self.marked: list[int] = []
        for _ in self.run.epochs(epochs):
            self.steps.append([])
            for number, batch in enumerate(self.batches):
                before = self.run.step
                for x, y in batch:
                    torch.nn.functional.mse_loss(self.net(x), y).backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.scheduler.step()
                assert self.run.step == before + 1, number
                self.steps[-1].append(self.run.step)
                if self.run.every(5):
                    self.marked.append(self.run.step)
        return self


EXPECTED = [[epoch * STEPS + step + 1 for step in range(STEPS)] for epoch in range(EPOCHS)]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "sync", [Sync(), Sync(period=5, momentum=0.5), Sync(period=50)], ids=lambda s: s.period
)
def test_iterations_are_steps_of_all_workers(world: int, sync: Sync) -> None:
    """Also in rounds, of which each is several steps."""
    for member in run_workers(world, lambda worker: Counted(worker, sync).train()):
        assert member.steps == EXPECTED
        assert len(member.batches) == STEPS
        assert member.run.total_steps == EPOCHS * STEPS == member.run.step == member.run.done
        assert member.marked == list(range(5, EPOCHS * STEPS + 1, 5))


def test_progress_bar_reaches_its_total(capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(SingleWorkerManager(), Sync())
    bar = tqdm(training.batches)
    for batch in bar:
        for x, y in batch:
            torch.nn.functional.mse_loss(training.net(x), y).backward()
            training.optimizer.step()
    assert (bar.n, bar.total) == (STEPS, STEPS)


def test_every_is_true_once_in_on_commit_for_each_multiple() -> None:
    """A round commits several steps at once, of which one may be a multiple."""
    commits: list[tuple[int, bool]] = []
    training = Counted(SingleWorkerManager(), Sync(period=4))
    training.run.on_commit(lambda run: commits.append((run.done, run.every(5))))
    training.train(1)
    assert commits == [(1, False), (2, False), (6, True), (10, True), (12, False)]


def test_every_within_microbatch_is_rejected() -> None:
    training = Training(SingleWorkerManager(), Sync())
    for _ in next(iter(training.batches)):
        with pytest.raises(RunError, match="before the step was finished"):
            training.run.every(2)
        break


def _batches(rows: Any) -> Any:
    net = torch.nn.Linear(2, 1)
    loader = DataLoader(rows, batch_size=8)
    return barnraise.init().prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)[2]


ROWS = TensorDataset(torch.randn(32, 2), torch.randn(32, 1))


def _unpack(batch: Any) -> None:
    _x, _y = batch


@pytest.mark.parametrize(
    "use", [_unpack, lambda batch: batch[0], lambda batch: dict(**batch)], ids=["unpack", "index", "mapping"]
)
def test_single_loop_is_told_to_be_two(use: Any) -> None:
    with pytest.raises(RunError) as caught:
        use(next(iter(_batches(ROWS))))
    assert "for x, y in batch:" in caught.value.hint


def test_batch_that_is_left_early_is_reported() -> None:
    batches = iter(_batches(ROWS))
    for _ in next(batches):
        break
    with pytest.raises(RunError, match="before its last micro-batch") as caught:
        next(batches)
    assert "leave both loops" in caught.value.hint


def test_total_steps_are_unknown_before_epochs() -> None:
    training = Training(SingleWorkerManager(), Sync())
    assert training.run.total_steps is None
    next(training.run.epochs(7))
    assert training.run.total_steps == 7 * STEPS


def test_device_is_the_one_that_the_worker_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BARNRAISE_DEVICE", raising=False)
    run = barnraise.init()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert run.device == (accelerator or torch.device("cpu"))
    monkeypatch.setenv("BARNRAISE_DEVICE", "cuda:1")
    assert run.device == torch.device("cuda:1")
