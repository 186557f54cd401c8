"""Objects that prepare rejects, and the hints in the errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import barnraise
from barnraise.core.errors import RunError

ROWS = TensorDataset(torch.arange(24.0).reshape(12, 2) / 24, torch.ones(12, 1))


def _prepare(model: torch.nn.Module, optimizer: Any, *more: Any, **options: Any) -> Any:
    loader = DataLoader(ROWS, batch_size=6)
    return barnraise.init(unit=3).prepare(model, optimizer, loader, *more, **options)


def _refused(model: torch.nn.Module, optimizer: Any, *more: Any) -> str:
    with pytest.raises(RunError) as caught:
        _prepare(model, optimizer, *more)
    return f"{caught.value.message} {caught.value.hint}"


def _sgd(*parameters: torch.nn.Parameter) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1)


def _train(model: torch.nn.Module, optimizer: Any, batches: Any) -> None:
    for batch in batches:
        for x, _ in batch:
            model(x).sum().backward()
            optimizer.step()


def test_trained_parameter_outside_model_is_rejected() -> None:
    """It would be neither saved nor sent to joining workers."""
    model, outside = torch.nn.Linear(2, 1), torch.nn.Linear(1, 5)
    message = _refused(model, [_sgd(*model.parameters()), _sgd(*outside.parameters())])
    assert "(5, 1), (5,)" in message
    assert "ModuleDict" in message
    weight = torch.nn.Parameter(torch.ones(7))
    assert "of shape (7,)" in _refused(model, _sgd(*model.parameters(), weight))
    both = torch.nn.ModuleList([model, outside])
    _prepare(both, [_sgd(*model.parameters()), _sgd(*outside.parameters())])


def test_parameter_in_two_optimizers_is_rejected() -> None:
    net = torch.nn.Linear(2, 1)
    assert "bias is in two optimizers" in _refused(net, [_sgd(*net.parameters()), _sgd(net.bias)])


def test_steps_with_arguments_are_rejected() -> None:
    net = torch.nn.Linear(2, 1)
    assert "LBFGS" in _refused(net, torch.optim.LBFGS(net.parameters()))
    optimizer = _sgd(*net.parameters())
    message = _refused(net, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    assert "ReduceLROnPlateau" in message
    assert "run.track" in message
    assert "DataLoader" in _refused(net, optimizer, DataLoader(ROWS))


def test_scheduler_with_argument_can_be_tracked() -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = _sgd(*net.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    run = barnraise.init(unit=3)
    run.track("scheduler", scheduler)
    _, _, batches = run.prepare(net, optimizer, DataLoader(ROWS, batch_size=6))
    for _ in run.epochs(4):
        for batch in batches:
            for x, y in batch:
                loss = (net(x) - y).square().mean()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
        scheduler.step(run.history[-1]["loss"])
    assert optimizer.param_groups[0]["lr"] < 0.1
    run.state_digest()


def test_sparse_gradients_are_rejected() -> None:
    net = torch.nn.ModuleDict({"words": torch.nn.Embedding(5, 2, sparse=True)})
    assert "words is an embedding whose sparse gradients" in _refused(net, _sgd(*net.parameters()))

    class SharedExchange(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(5, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.embedding(x.long(), self.weight, sparse=True)

    exchange = SharedExchange()
    _, optimizer, batches = _prepare(exchange, _sgd(*exchange.parameters()))
    with pytest.raises(RunError, match=r"shape \(5, 2\) is sparse"):
        _train(exchange, optimizer, batches)


def test_parameter_given_to_optimizer_later_is_rejected() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    net[0].requires_grad_(False)
    _, optimizer, batches = _prepare(net, _sgd(*net[1].parameters()))
    optimizer.add_param_group({"params": [net[0].weight.requires_grad_(True)]})  # type: ignore[union-attr,operator]
    with pytest.raises(RunError, match=r"0\.weight was given to an optimizer after prepare") as caught:
        _train(net, optimizer, batches)
    assert "when you call prepare" in caught.value.hint


def test_model_on_cpu_of_worker_with_gpu_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BARNRAISE_DEVICE", "cuda:1")
    net = torch.nn.Linear(2, 1)
    _prepare(net, _sgd(*net.parameters()), device_placement=False)
    assert "this worker has cuda:1, but the model is on the CPU" in caplog.text
    caplog.clear()
    monkeypatch.setenv("BARNRAISE_DEVICE", "cpu")
    net = torch.nn.Linear(2, 1)
    _prepare(net, _sgd(*net.parameters()), device_placement=False)
    assert "model.to" not in caplog.text
