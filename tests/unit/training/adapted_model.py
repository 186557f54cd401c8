"""A model with a large frozen base and small trained adapters, and sessions that train it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.training.flat_loop import microbatches

WIDTH, RANK, BATCH, UNIT = 192, 8, 8, 2
_DRAWING = threading.Lock()


class Adapted(torch.nn.Module):
    """Frozen linear layer with a low-rank adapter, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = torch.nn.Linear(WIDTH, RANK, bias=False)
        self.up = torch.nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.base(x) + self.up(self.down(x))
        return torch.tanh(hidden)


def make_model(seed: int = 0, layers: int = 6) -> torch.nn.Sequential:
    """Return the model; ``seed`` decides the base and the adapters."""
    with _DRAWING:  # all threads share torch's generator
        torch.manual_seed(seed)
        return torch.nn.Sequential(*(Adapted() for _ in range(layers))).double()


def data() -> TensorDataset:
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(48, WIDTH, generator=stream, dtype=torch.float64)
    return TensorDataset(x, x.roll(1, 1).tanh())


class Tuning:
    """Fine-tuning of one worker."""

    def __init__(
        self,
        manager: Any,
        model: torch.nn.Module | None = None,
        *,
        everything: bool = False,
        outside: torch.nn.Parameter | None = None,
        checkpoints: CheckpointManager | None = None,
        **options: Any,
    ) -> None:
        self.net = make_model() if model is None else model
        given = self.net.parameters()
        chosen = [parameter for parameter in given if everything or parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(chosen + ([] if outside is None else [outside]), lr=0.01)
        self.run = Session(
            manager,
            seed=3,
            unit=UNIT,
            checkpoints=checkpoints or CheckpointManager(None, 60.0, 1),
            **options,
        )
        loader = DataLoader(data(), batch_size=BATCH)
        _, _, self.batches = self.run.prepare(self.net, self.optimizer, loader)

    @property
    def state(self) -> Any:
        return self.run._state

    @property
    def trained_bytes(self) -> int:
        """Return the size of the trained parameters with the optimizer's memory of them."""
        parameters = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        return 3 * sum(parameter.numel() * parameter.element_size() for parameter in parameters)

    def train(self, stop: int, after_step: Callable[[Tuning], None] = lambda tuning: None) -> Tuning:
        """Train until step ``stop``; call ``after_step`` between two steps."""
        for _ in self.run.epochs(100):
            for batch in self.batches:
                for x, y in batch:
                    torch.nn.functional.mse_loss(self.net(x), y).backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                after_step(self)
                if self.run.step >= stop:
                    return self
        return self

    def train_flat(self, stop: int) -> Tuning:
        """Train until commit ``stop``, and leave the loop right after it."""
        for x, y in microbatches(self.batches):
            torch.nn.functional.mse_loss(self.net(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.run.done == stop:
                break
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.net.state_dict().items()}


def assert_equal_models(first: torch.nn.Module, second: torch.nn.Module) -> None:
    """Compare all tensors of two models, bit by bit."""
    theirs = second.state_dict()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
