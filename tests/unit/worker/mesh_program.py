"""FSDP2 on `barnraise.device_mesh`: ranks say on which machine they are, train, and save their shards."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import barnraise

BATCH, WIDTH = 4, 12


class Training:
    """Model and optimizer, as torch's distributed checkpoints want to see them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, dict[str, object]]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def main() -> None:
    machines, folder, last, report = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["BARNRAISE_NODE"] = machines[rank]
    dist.init_process_group("barnraise")
    mesh = barnraise.device_mesh()
    model = model_of()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state = {"training": Training(model, optimizer)}
    done = barnraise.load_sharded(state, folder) or 0
    losses = []
    for step in range(done, last):
        loss = (model(batch_of(step)[rank::world]) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
    barnraise.save_sharded(state, folder, last)
    if rank == 0:
        with open(report, "w", encoding="ascii") as file:
            json.dump(
                {"names": mesh.mesh_dim_names, "mesh": mesh.mesh.tolist(), "done": done, "losses": losses},
                file,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
