"""Program with remote calls, for a run on several hosts: plain, in a session, or with torch's own RPC."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import barnraise
from barnraise import rpc
from barnraise.core.errors import BarnraiseError


@rpc.register
def add(x: torch.Tensor, y: int) -> torch.Tensor:
    return x + y


@rpc.register
def make_table(size: int) -> dict[str, torch.Tensor]:
    return {"row": torch.arange(float(size))}


@rpc.register
def lookup(table: rpc.RemoteReference, key: str) -> float:
    return float(table.fetch()[key].sum())


def call_all(rank: int, world: int) -> None:
    """Call every rank, and hand a reference on to every rank."""
    for to in range(world):
        assert rpc.call(to, add, torch.ones(3), to).tolist() == [1.0 + to] * 3
    with rpc.remote((rank + 1) % world, make_table, 2_000_000) as table:
        expected = float(torch.arange(2_000_000.0).sum())
        assert [rpc.call(to, lookup, table, "row") for to in range(world)] == [expected] * world


def in_group() -> None:
    dist.init_process_group()
    rpc.start()
    call_all(dist.get_rank(), dist.get_world_size())
    rpc.stop()
    print("rank", dist.get_rank(), "of", dist.get_world_size(), rpc.statistics(), flush=True)


def in_session() -> None:
    run = barnraise.init()
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(60, 3), torch.randn(60, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=12)
    model, optimizer, batches = run.prepare(model, optimizer, loader)
    rpc.start(run)
    for _ in run.epochs(2):
        for batch in batches:
            for x, y in batch:
                torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            call_all(run.rank, run.world)
    rpc.stop()
    print("rank", run.rank, "of", run.world, rpc.statistics(), flush=True)


def with_torch() -> None:
    from torch.distributed import rpc as torch_rpc

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        torch_rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world)
    except BarnraiseError as error:
        print("refused:", error, flush=True)


if __name__ == "__main__":
    {"group": in_group, "session": in_session, "torch": with_torch}[sys.argv[1]]()
