"""Commits that fail part-way: the step is neither repeated nor saved, even if a script catches the error."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from barnraise.core.errors import StepFailed
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.training.flat_loop import microbatches
from tests.unit.training.threaded_group import ThreadWorker, run_workers


class HalfStep(torch.optim.SGD):
    """Optimizer that moves the first parameter, and then fails in its second step."""

    def __init__(self, *given: Any, error: BaseException | None = None, **options: Any) -> None:
        super().__init__(*given, **options)
        self.error, self.calls = error, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        if self.calls == 2 and self.error is not None:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise self.error
        super().step(closure)


class Script:
    """Training of two parameters; ``error``: of the optimizer in step 2."""

    def __init__(self, manager: Any, error: BaseException | None = None) -> None:
        torch.manual_seed(0)
        self.net: Any = torch.nn.Linear(2, 1)
        optimizer = HalfStep(self.net.parameters(), lr=0.1, error=error)
        self.original = optimizer
        rows = torch.randn(24, 2)
        loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=8)
        self.run = Session(manager, seed=0, unit=4, checkpoints=CheckpointManager(None, 60.0, 1))
        _, self.optimizer, self.batches = self.run.prepare(self.net, optimizer, loader)

    def train(self, caught: type[BaseException] | tuple[()] = ()) -> None:
        """Train an epoch; go on after errors of the type ``caught``, as scripts do."""
        for x, y in microbatches(self.batches):
            try:
                loss: Any = torch.nn.functional.mse_loss(self.net(x), y)
                loss.backward()
                self.optimizer.step()
            except caught:
                pass
            self.optimizer.zero_grad()


@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt()])
def test_half_applied_step_is_neither_repeated_nor_saved(error: BaseException, tmp_path: Path) -> None:
    script = Script(SingleWorkerManager(), error)
    with pytest.raises(StepFailed, match=r"step 2 was applied only in part .*(no memory|KeyboardInterrupt)"):
        script.train(type(error))
    assert script.original.calls == 2
    with pytest.raises(StepFailed, match="step 2 was applied only in part"):
        script.run.save(tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
    with pytest.raises(StepFailed, match="step 2 was applied only in part"):
        script.run.state_digest()


def test_other_worker_is_not_blamed_for_a_half_applied_step() -> None:
    """Before, the others ended with "workers of one group are at different steps"."""
    messages: dict[int, str] = {}
    others = threading.Event()

    def train(manager: ThreadWorker) -> None:
        script = Script(manager, MemoryError("no memory") if manager.rank == 1 else None)
        try:
            script.train(MemoryError)
        except StepFailed as error:
            messages[manager.rank] = error.message
            others.set()
            raise
        except threading.BrokenBarrierError:  # the other worker is gone, as after a crash
            assert others.wait(60)

    with pytest.raises(StepFailed, match="applied only in part"):
        run_workers(2, train)
    assert set(messages) == {1}


def test_model_of_a_failed_callback_can_be_saved_but_not_trained(tmp_path: Path) -> None:
    """All workers run the callbacks: one that has failed here may hold another state than the others."""
    script = Script(SingleWorkerManager())

    def fail(run: Session) -> None:
        if run.done == 2:
            raise ValueError("the plot")

    script.run.on_commit(fail)
    with pytest.raises(StepFailed, match=r"step 2 has a callback that failed .*ValueError: the plot"):
        script.train(ValueError)
    assert script.run.done == 2
    script.run.save(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").is_file()
    assert script.run.map(str, [1]) == ["1"]
