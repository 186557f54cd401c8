"""DistributedDataParallel against one process that sees every rank's batch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from barnraise.training.replica_sync import sync_replicas
from tests.numerics.harness import values
from tests.numerics.harness.worker import Context

STEPS = 4
RATE = 0.05


def model_of(dtype: torch.dtype = torch.float64, width: int = 37) -> nn.Sequential:
    """The same weights on every rank and in the reference."""
    torch.manual_seed(1234)
    layers = nn.Sequential(
        nn.Linear(11, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    )
    return layers.to(dtype)


def batch_of(rank: int, step: int, dtype: torch.dtype = torch.float64, rows: int = 4) -> torch.Tensor:
    return values.rough_inputs("float64", rows * 11, rank, 1000 + step).reshape(rows, 11).to(dtype)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) ** 2).mean()


def reference(ctx: Context, model: nn.Module, dtype: torch.dtype = torch.float64, rows: int = 4) -> nn.Module:
    """Training on all batches together, in one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        together = torch.cat([batch_of(rank, step, dtype, rows) for rank in range(ctx.world)])
        loss_of(model, together).backward()
        optimizer.step()
    return model


def train(ctx: Context, model: nn.Module, dtype: torch.dtype = torch.float64, rows: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch_of(ctx.rank, step, dtype, rows)).backward()
        optimizer.step()


def near(ctx: Context, label: str, model: nn.Module, right: nn.Module, tolerance: float) -> str:
    """Every parameter within ``tolerance``; the digest shows that all ranks hold the same bits."""
    for (name, got), wanted in zip(model.named_parameters(), right.parameters(), strict=True):
        gap = (got.double() - wanted.double()).abs().max().item()
        ctx.check(gap <= tolerance, f"{label}: {name} is off by {gap:.3g}, more than {tolerance:g}")
    return values.digest(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))


def ddp(ctx: Context, options: dict[str, object]) -> str:
    wrapped = DistributedDataParallel(model_of(), process_group=ctx.group, **options)
    train(ctx, wrapped)
    return near(ctx, f"DDP {options}", wrapped.module, reference(ctx, model_of()), 1e-12)


def ddp_small_buckets(ctx: Context) -> str:
    """Many buckets, so that several all-reduces are in flight."""
    wrapped = DistributedDataParallel(model_of(width=200), process_group=ctx.group, bucket_cap_mb=0.05)
    train(ctx, wrapped)
    return near(ctx, "DDP buckets", wrapped.module, reference(ctx, model_of(width=200)), 1e-12)


def ddp_large(ctx: Context) -> str:
    """Gradients of some megabytes in float32."""
    wrapped = DistributedDataParallel(model_of(torch.float32, 700), process_group=ctx.group, bucket_cap_mb=1)
    train(ctx, wrapped, torch.float32)
    right = reference(ctx, model_of(torch.float64, 700))
    return near(ctx, "large DDP", wrapped.module, right, 1e-5)


def ddp_fp16_compress(ctx: Context) -> str:
    wrapped = DistributedDataParallel(model_of(torch.float32), process_group=ctx.group)
    wrapped.register_comm_hook(ctx.group, default_hooks.fp16_compress_hook)
    train(ctx, wrapped, torch.float32)
    return near(ctx, "fp16_compress", wrapped.module, reference(ctx, model_of()), 2e-3)


def ddp_plain_hook(ctx: Context) -> str:
    wrapped = DistributedDataParallel(model_of(), process_group=ctx.group)
    wrapped.register_comm_hook(ctx.group, default_hooks.allreduce_hook)
    train(ctx, wrapped)
    return near(ctx, "allreduce hook", wrapped.module, reference(ctx, model_of()), 1e-12)


def ddp_builtin_fp16(ctx: Context) -> str:
    """torch's C++ hook insists on a future of a C++ type, which no backend written in Python can make."""
    wrapped = DistributedDataParallel(model_of(torch.float32), process_group=ctx.group)
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    if ctx.backend != "gloo":
        try:
            train(ctx, wrapped, torch.float32)
        except RuntimeError as error:
            ctx.check("should return TensorList" in str(error), f"another error than torch's own: {error}")
            return "refused"
    train(ctx, wrapped, torch.float32)
    return near(ctx, "builtin FP16", wrapped.module, reference(ctx, model_of()), 2e-3)


def ddp_power_sgd(ctx: Context) -> str:
    """One row per rank makes gradients of rank <= 5, which PowerSGD of rank 8 represents exactly."""
    wrapped = DistributedDataParallel(model_of(torch.float32, 64), process_group=ctx.group)
    state = powerSGD_hook.PowerSGDState(
        ctx.group, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(ctx, wrapped, torch.float32, rows=1)
    ctx.check(state.compression_stats()[2] < state.compression_stats()[1], "PowerSGD compressed nothing")
    right = reference(ctx, model_of(width=64), rows=1)
    return near(ctx, "PowerSGD", wrapped.module, right, 1e-4)


def ddp_bfloat16(ctx: Context) -> str:
    wrapped = DistributedDataParallel(model_of(torch.bfloat16), process_group=ctx.group)
    train(ctx, wrapped, torch.bfloat16)
    return near(ctx, "bfloat16", wrapped.module, reference(ctx, model_of()), 3e-2)


def ddp_no_sync(ctx: Context) -> str:
    """Two micro-batches without communication, the third with: gradients add up over all three."""
    wrapped = DistributedDataParallel(model_of(), process_group=ctx.group)
    right = model_of()
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE) for model in (wrapped, right)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batches = range(3 * step, 3 * step + 3)
        with wrapped.no_sync():
            for batch in batches[:2]:
                loss_of(wrapped, batch_of(ctx.rank, batch)).backward()
        loss_of(wrapped, batch_of(ctx.rank, batches[2])).backward()
        for batch in batches:
            loss_of(right, torch.cat([batch_of(rank, batch) for rank in range(ctx.world)])).backward()
        for optimizer in optimizers:
            optimizer.step()
    return near(ctx, "no_sync", wrapped.module, right, 1e-12)


class _Branches(nn.Module):
    """A second branch that only some ranks use in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = model_of(), model_of(width=9)

    def forward(self, batch: torch.Tensor, both: bool) -> torch.Tensor:
        out = self.first(batch)
        return out + self.second(batch) if both else out


def ddp_unused(ctx: Context) -> str:
    wrapped = DistributedDataParallel(_Branches(), process_group=ctx.group, find_unused_parameters=True)
    right = _Branches()
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE) for model in (wrapped, right)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (wrapped(batch_of(ctx.rank, step), _both(ctx.rank, step)) ** 2).mean().backward()
        losses = [(right(batch_of(rank, step), _both(rank, step)) ** 2).mean() for rank in range(ctx.world)]
        (sum(losses) / ctx.world).backward()
        for optimizer in optimizers:
            optimizer.step()
    return near(ctx, "unused parameters", wrapped.module, right, 1e-12)


def _both(rank: int, step: int) -> bool:
    return step % 2 == 1 and rank % 2 == 0


def ddp_join(ctx: Context) -> str:
    """Rank r has 2 + r batches; those that have run out answer for the others until the last is done."""
    wrapped = DistributedDataParallel(model_of(), process_group=ctx.group)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=RATE)
    with wrapped.join():
        for step in range(2 + ctx.rank):
            optimizer.zero_grad()
            loss_of(wrapped, batch_of(ctx.rank, step)).backward()
            optimizer.step()
    right = model_of()
    optimizer = torch.optim.SGD(right.parameters(), lr=RATE)
    for step in range(2 + ctx.world - 1):
        optimizer.zero_grad()
        active = [rank for rank in range(ctx.world) if step < 2 + rank]
        sum(loss_of(right, batch_of(rank, step)) / ctx.world for rank in active).backward()
        optimizer.step()
    return near(ctx, "join", wrapped.module, right, 1e-12)


def ddp_own_hook(ctx: Context) -> str:
    """A hook as users write it: another type on the wire, its future chained."""

    def bfloat16_hook(group, bucket):  # DDP takes no postponed annotations
        small = (bucket.buffer() / ctx.world).to(torch.bfloat16)
        future = dist.all_reduce(small, group=group, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(_only(done.value())))

    wrapped = DistributedDataParallel(model_of(torch.float32), process_group=ctx.group)
    wrapped.register_comm_hook(ctx.group, bfloat16_hook)
    train(ctx, wrapped, torch.float32)
    return near(ctx, "own hook", wrapped.module, reference(ctx, model_of()), 2e-2)


def _only(value: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


def sharded_optimizer(ctx: Context) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model_of(), process_group=ctx.group)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.Adam, process_group=ctx.group, lr=RATE
    )
    right = copy.deepcopy(model_of())
    whole = torch.optim.Adam(right.parameters(), lr=RATE)
    for step in range(STEPS):
        for each in (optimizer, whole):
            each.zero_grad()
        loss_of(wrapped, batch_of(ctx.rank, step)).backward()
        loss_of(right, torch.cat([batch_of(rank, step) for rank in range(ctx.world)])).backward()
        for each in (optimizer, whole):
            each.step()
    return near(ctx, "ZeroRedundancyOptimizer", wrapped.module, right, 1e-10)


VARIANTS: dict[str, Callable[[Context], str]] = {
    "small buckets": ddp_small_buckets,
    "large": ddp_large,
    "fp16_compress": ddp_fp16_compress,
    "allreduce hook": ddp_plain_hook,
    "builtin FP16": ddp_builtin_fp16,
    "PowerSGD": ddp_power_sgd,
    "bfloat16": ddp_bfloat16,
    "no_sync": ddp_no_sync,
    "unused": ddp_unused,
    "join": ddp_join,
    "own hook": ddp_own_hook,
    "sharded optimizer": sharded_optimizer,
}


def variant(ctx: Context, name: str) -> str:
    return VARIANTS[name](ctx)


def drifting_replicas(ctx: Context, every: int) -> list[str]:
    """Train replicas that round differently on each rank; return the digest of their state at each step."""
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    sync_replicas(model, optimizer, every=every, group=ctx.group)
    digests = []
    for _ in range(2 * every):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * (1 + ctx.rank * 1e-5)
        optimizer.step()
        state = [*model.state_dict().values()]
        state += [value for part in optimizer.state.values() for value in part.values()]
        digests.append(values.digest(torch.cat([tensor.detach().double().reshape(-1) for tensor in state])))
    return digests
