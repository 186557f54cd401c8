"""Collectives, DDP and FSDP2 between machines of different systems, compared with the exact results."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import barnraise

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)


def own(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return whole numbers: every dtype holds their sum exactly."""
    return (torch.arange(37) % 5 + rank).to(dtype)


def train(model: torch.nn.Module, x: torch.Tensor) -> None:
    """Take four steps of gradient descent on the sum of squares."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if isinstance(model, DistributedDataParallel):  # builds of torch round differently, so replicas drift
        barnraise.sync_replicas(model, optimizer, every=2)
    for _ in range(4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def small_model() -> torch.nn.Module:
    """Return a model whose numbers are the same with every build of torch, unlike random numbers."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 4))
    with torch.no_grad():
        for place, value in enumerate(model.parameters()):
            numbers = torch.arange(value.numel(), dtype=torch.float64) + place
            value.copy_(torch.sin(numbers).reshape(value.shape).float())
    return model


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def main() -> None:
    dist.init_process_group("barnraise")
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong: list[str] = []
    count = 0

    def check(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if not torch.equal(actual, expected):
            wrong.append(name)

    for dtype in DTYPES:
        parts = [own(other, dtype) for other in range(world)]
        total = torch.stack(parts).sum(0).to(dtype)
        summed = own(rank, dtype)
        dist.all_reduce(summed)
        check(f"all_reduce {dtype}", summed, total)
        largest = own(rank, dtype)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        check(f"max {dtype}", largest, own(world - 1, dtype))
        sent = own(rank, dtype)
        dist.broadcast(sent, src=world - 1)
        check(f"broadcast {dtype}", sent, own(world - 1, dtype))
        gathered = [torch.empty(37, dtype=dtype) for _ in range(world)]
        dist.all_gather(gathered, own(rank, dtype))
        check(f"all_gather {dtype}", torch.stack(gathered), torch.stack(parts))
        scattered = torch.empty(37, dtype=dtype)
        dist.reduce_scatter(scattered, [own(rank, dtype) for _ in range(world)])
        check(f"reduce_scatter {dtype}", scattered, total)
        turned = [torch.empty(37, dtype=dtype) for _ in range(world)]
        dist.all_to_all(turned, [own(rank, dtype) for _ in range(world)])
        check(f"all_to_all {dtype}", torch.stack(turned), torch.stack(parts))
    # Sums of arbitrary numbers have the same bits everywhere.
    noise = torch.sin(torch.arange(10_007, dtype=torch.float64) * (rank + 1)).float()
    dist.all_reduce(noise)
    bits = noise.view(torch.int32).to(torch.int64).sum().reshape(1)
    seen = [torch.empty_like(bits) for _ in range(world)]
    dist.all_gather(seen, bits)
    check("bits of a sum", torch.stack(seen), torch.stack([seen[0]] * world))
    names: list[object] = [None] * world
    dist.all_gather_object(names, {"rank": rank, "torch": torch.__version__})
    count += 1
    if [name["rank"] for name in names if isinstance(name, dict)] != list(range(world)):
        wrong.append("all_gather_object")
    rows = torch.cos(torch.arange(world * 8 * 6, dtype=torch.float64)).reshape(world, 8, 6).float()
    alone = small_model()
    train(alone, rows.flatten(0, 1))
    sharded = small_model()
    fully_shard(sharded)
    for name, model in (("ddp", DistributedDataParallel(small_model())), ("fsdp2", sharded)):
        train(model, rows[rank])
        for actual, expected in zip(model.parameters(), alone.parameters(), strict=True):
            value = whole(actual).detach()
            same = [torch.empty_like(value) for _ in range(world)]
            dist.all_gather(same, value)
            check(f"{name}: equal on all ranks", torch.stack(same), value.expand(world, *value.shape))
            off = (value - expected).abs().max()
            check(f"{name}: as one machine, off by {off:.1e}", (off < 1e-5).reshape(1), torch.tensor([True]))
    dist.barrier()
    print("CHECKED " + json.dumps({"rank": rank, "checked": count, "wrong": wrong}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
