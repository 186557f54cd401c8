"""Our SyncBatchNorm on several ranks against ordinary batch normalisation of the whole batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from barnraise.collectives.batch_norm import SyncBatchNorm
from tests.numerics.harness import values
from tests.numerics.harness.worker import Context

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CHANNELS = 5
TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 4e-2}


def _batch(rank: int, call: int, rows: int, spatial: list[int], dtype: str) -> torch.Tensor:
    """Channels with means away from zero, in float64 so far that sums of squares would lose the variance."""
    shape = [rows, CHANNELS, *spatial]
    count = int(torch.tensor(shape).prod())
    noise = values.rough_inputs("float64", count, rank, call).reshape(shape)
    far = 3000 if dtype == "float64" else 3
    offset = torch.linspace(-1, far, CHANNELS, dtype=torch.float64).reshape(1, -1, *[1] * len(spatial))
    return (noise * (rank + 1) + offset).to(values.DTYPES[dtype])


def _rows(rank: int, uneven: bool, empty: bool) -> int:
    if empty and rank == 1:
        return 0
    return 3 + 2 * rank if uneven else 4


def matches(
    ctx: Context,
    spatial: list[int],
    dtype: str,
    uneven: bool = False,
    empty: bool = False,
    affine: bool = True,
    momentum: float | None = 0.1,
) -> str:
    tolerance = TOLERANCES[dtype]
    dimensions = max(1, len(spatial))
    whole_norm = NORMS[dimensions](CHANNELS, affine=affine, momentum=momentum).double()
    if affine:
        with torch.no_grad():
            whole_norm.weight.copy_(torch.linspace(0.5, 2, CHANNELS))
            whole_norm.bias.copy_(torch.linspace(-1, 1, CHANNELS))
    source = NORMS[dimensions](CHANNELS, affine=affine, momentum=momentum)
    source.load_state_dict(whole_norm.state_dict())
    wide = torch.float64 if dtype == "float64" else torch.float32
    norm = SyncBatchNorm.convert(source.to(wide), ctx.group)
    assert isinstance(norm, SyncBatchNorm)
    for call in range(3):
        rows = [_rows(rank, uneven, empty) for rank in range(ctx.world)]
        batches = [_batch(rank, call, rows[rank], spatial, dtype) for rank in range(ctx.world)]
        own_batch = batches[ctx.rank].clone().requires_grad_()
        together = torch.cat(batches).double().requires_grad_()
        slope = values.rough_inputs("float64", together.numel(), 0, call + 50).reshape(together.shape)
        start = sum(rows[: ctx.rank])
        part = slice(start, start + rows[ctx.rank])
        norm.zero_grad(), whole_norm.zero_grad()
        got, wanted = norm(own_batch), whole_norm(together)
        (got.double() * slope[part]).sum().backward()
        (wanted * slope).sum().backward()
        assert own_batch.grad is not None
        assert together.grad is not None
        _near(ctx, "output", got, wanted[part], tolerance)
        _near(ctx, "input gradient", own_batch.grad, together.grad[part], tolerance * 20)
        ctx.check(got.dtype == own_batch.dtype, "the output has another type than the input")
    _near(ctx, "running mean", norm.running_mean, whole_norm.running_mean, tolerance * 10)
    _near(ctx, "running variance", norm.running_var, whole_norm.running_var, tolerance * 100)
    ctx.check(int(norm.num_batches_tracked) == 3, "num_batches_tracked")
    norm.eval(), whole_norm.eval()
    _near(ctx, "evaluation", norm(own_batch), whole_norm(together)[part], tolerance * 10)
    return values.digest(torch.stack([norm.running_mean, norm.running_var]))


def _near(ctx: Context, label: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    if not got.numel():
        return
    gap = ((got.double() - wanted.double()).abs() / (1 + wanted.double().abs())).max().item()
    ctx.check(gap <= tolerance, f"{label} is off by {gap:.3g}, more than {tolerance:g}")


def in_ddp(ctx: Context) -> str:
    """A small network in DDP: all of its state equals single-process training of the whole batch."""

    def network() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * 9, 3),
            nn.BatchNorm1d(3),
        ).double()

    def images(rank: int, step: int) -> torch.Tensor:
        return values.rough_inputs("float64", 4 * 2 * 25, rank, step).reshape(4, 2, 5, 5)

    wrapped = DistributedDataParallel(SyncBatchNorm.convert(network(), ctx.group), process_group=ctx.group)
    right = network()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (wrapped, right)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (wrapped(images(ctx.rank, step)) ** 3).mean().backward()
        (right(torch.cat([images(rank, step) for rank in range(ctx.world)])) ** 3).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    states = zip(wrapped.module.state_dict().items(), right.state_dict().values(), strict=True)
    for (name, got), wanted in states:
        _near(ctx, name, got, wanted, 1e-10)
    return values.digest(
        torch.cat([value.reshape(-1).double() for value in wrapped.module.state_dict().values()])
    )


def too_few(ctx: Context) -> None:
    """One value per channel over all ranks has no variance: every rank says so."""
    norm = SyncBatchNorm(CHANNELS, process_group=ctx.group)
    batch = torch.ones(int(ctx.rank == 0), CHANNELS)
    try:
        norm(batch)
    except ValueError as error:
        ctx.check("more than 1 value per channel" in str(error), str(error))
    else:
        ctx.failures.append("did not raise")
