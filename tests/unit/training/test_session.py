"""Session of a single worker: the same mathematics as a plain loop, and rejected uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import barnraise
from barnraise.core.errors import RunError
from barnraise.runs.sharding import DataOrder
from tests.unit.training.flat_loop import microbatches

SAMPLES, BATCH = 96, 24


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=stream, dtype=dtype)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8, dtype=dtype), torch.nn.Tanh(), torch.nn.Linear(8, 1, dtype=dtype)
    )


def train(
    net: torch.nn.Module, epochs: int = 2, unit: int = 5, clip: float | None = None, **options: Any
) -> Any:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run = barnraise.init(seed=9, unit=unit)
    loader = DataLoader(options.get("data", data()), batch_size=BATCH, shuffle=True)
    net, optimizer, batches, scheduler = run.prepare(net, optimizer, loader, scheduler)
    if clip is not None:
        run.clip_grad_norm(clip)
    for _ in run.epochs(epochs):
        for batch in batches:
            for x, y in batch:
                loss = torch.nn.functional.mse_loss(net(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                run.log(loss=loss)
    return run


@pytest.mark.parametrize("clip", [None, 0.05])
def test_microbatches_add_up_to_plain_step(clip: float | None) -> None:
    """The size of micro-batches changes nothing: the result equals a loop over whole batches."""
    ours = model()
    run = train(ours, clip=clip)
    assert run.done == 2 * SAMPLES // BATCH
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    course = DataOrder(SAMPLES, BATCH, BATCH, seed=9)
    x, y = data().tensors
    losses = []
    for step in range(run.done):
        chosen = course.sample_order(course.locate_step(step)[0])[slice(*course.positions(step))]
        loss = torch.nn.functional.mse_loss(plain(x[chosen]), y[chosen])
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    for parameter, plain_parameter in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, plain_parameter, rtol=0, atol=1e-9 if clip else 1e-12)
    logged = [entry["loss"] for entry in run.history]
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(losses[: len(logged)]), rtol=0, atol=1e-9)
    other_unit = model()
    train(other_unit, unit=24, clip=clip)
    for parameter, other_parameter in zip(ours.parameters(), other_unit.parameters(), strict=True):
        torch.testing.assert_close(parameter, other_parameter, rtol=0, atol=1e-9)


def test_random_numbers_depend_on_microbatch_and_sample() -> None:
    class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = data()[index]
            return x + torch.randn(6, dtype=x.dtype), y

    def dropping() -> torch.nn.Module:
        torch.manual_seed(4)
        return torch.nn.Sequential(
            torch.nn.Linear(6, 8, dtype=torch.float64),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(8, 1, dtype=torch.float64),
        )

    first, second = dropping(), dropping()
    train(first, data=Noisy())
    torch.manual_seed(12345)  # as if the process had drawn other numbers
    train(second, data=Noisy())
    for parameter, other_parameter in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(parameter, other_parameter)


def test_batch_norm_stats_follow_microbatch_order() -> None:
    torch.manual_seed(3)
    net = torch.nn.Sequential(
        torch.nn.BatchNorm1d(6, dtype=torch.float64), torch.nn.Linear(6, 1, dtype=torch.float64)
    )
    run = train(net, epochs=1, unit=8)
    course = DataOrder(SAMPLES, BATCH, 8, seed=9)
    x, _ = data().tensors
    expected = torch.nn.BatchNorm1d(6, dtype=torch.float64)
    order = course.sample_order(0)
    for step in range(run.done):
        for unit in course.micro_batches(step):
            expected(x[order[unit.first : unit.last]])
    norm = net[0]
    assert isinstance(norm, torch.nn.BatchNorm1d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_mean, expected.running_mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(norm.running_var, expected.running_var, rtol=0, atol=1e-12)
    assert norm.num_batches_tracked == expected.num_batches_tracked


def test_unsupported_use_is_rejected_with_hint() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run = barnraise.init()
    net, optimizer, batches, scheduler = run.prepare(
        net, optimizer, DataLoader(data(), batch_size=8), scheduler
    )
    with pytest.raises(RunError, match="outside the loop"):
        scheduler.step()
    for x, y in microbatches(batches):
        torch.nn.functional.mse_loss(net(x), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        with pytest.raises(RunError, match="were changed between backward") as caught:
            optimizer.step()
        assert "run.clip_grad_norm" in caught.value.hint
        break
    synced = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.SyncBatchNorm(6))
    with pytest.raises(RunError, match="communicates inside forward"):
        barnraise.init().prepare(
            synced, torch.optim.SGD(synced.parameters(), lr=1.0), DataLoader(data(), batch_size=8)
        )


def test_batch_without_step_is_reported() -> None:
    net = model()
    run = barnraise.init()
    _, _, batches = run.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data(), batch_size=8)
    )
    with pytest.raises(RunError, match=r"ended without optimizer.step\(\)"):
        list(microbatches(batches))


def test_model_is_saved_as_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    net = model()
    run = train(net, epochs=1)
    run.save(tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in saved.items()} == {
        name: tensor.tolist() for name, tensor in net.state_dict().items()
    }


def test_frozen_batch_norm_keeps_and_uses_stats() -> None:
    """A layer that runs twice in a micro-batch counts once."""
    torch.manual_seed(3)
    frozen, twice = torch.nn.BatchNorm1d(6, dtype=torch.float64), torch.nn.BatchNorm1d(6, dtype=torch.float64)
    frozen.running_mean.fill_(0.5)  # type: ignore[union-attr]
    frozen.eval()
    net = torch.nn.ModuleList([frozen, twice, torch.nn.Linear(6, 1, dtype=torch.float64)])
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    run = barnraise.init(unit=8)
    _, optimizer, batches = run.prepare(net, optimizer, DataLoader(data(), batch_size=BATCH))
    for x, y in microbatches(batches):
        assert torch.allclose(frozen(x), (x - 0.5) / (1 + frozen.eps) ** 0.5 * frozen.weight + frozen.bias)
        out = net[2](twice(twice(frozen(x))))
        torch.nn.functional.mse_loss(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(frozen.running_mean, torch.full((6,), 0.5, dtype=torch.float64))
    assert int(frozen.num_batches_tracked) == 0  # type: ignore[arg-type]
    assert int(twice.num_batches_tracked) == SAMPLES // 8  # type: ignore[arg-type]


def test_worker_joining_at_end_of_epoch_ends_epoch() -> None:
    run = train(model(), epochs=1)
    parts = run._state.flatten(run.done)
    late = barnraise.init(seed=9, unit=5)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
    _, _, batches, _ = late.prepare(net, optimizer, loader, scheduler)
    late._step_loop.done = late._state.load(parts)
    passes = [(epoch, sum(1 for _ in batches)) for epoch in late.epochs(1)]
    assert passes == [(0, 0)], "the pass is over, what follows it is not"
