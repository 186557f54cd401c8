"""A transformer that learns to write its own source, sharded over all machines by torch's FSDP2.

No machine holds the whole model, and none shares a disk with another. Every few steps the whole state is
saved, so that any one machine may be lost. After a loss the program restarts from there.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import barnraise

TEXT = torch.tensor(list(Path(__file__).read_bytes()))
LENGTH, BATCH, WIDTH, SAVE_EVERY = 64, 12, 64, 10


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.out = nn.Linear(WIDTH, 256)

    def forward(self, codes, following):
        x = self.letters(codes) + self.places.weight
        past_only = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=codes.device)
        for layer in self.layers:
            x = layer(x, past_only, is_causal=True)
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), following.flatten())


class Training:
    """Model and optimizer, as torch's distributed checkpoints want to see them."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def batch(step, rank, world):
    """Return this rank's part of a batch. It depends on the step alone, not on the world."""
    starts = torch.randint(len(TEXT) - LENGTH - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    pieces = torch.stack([TEXT[start : start + LENGTH + 1] for start in starts[rank::world]])
    return pieces[:, :-1], pieces[:, 1:]


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--small", action="store_true")
    options.add_argument("--steps", type=int, default=300)
    given = options.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group()
    else:  # plain python: a group of one
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    )

    torch.manual_seed(0)
    model = Writer().to(device)
    mesh = barnraise.device_mesh(device_type=torch.device(device).type)  # shards over the fastest links
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    state = {"training": Training(model, optimizer)}

    done = barnraise.load_sharded(state, "checkpoints") or 0
    for step in range(done, 25 if given.small else given.steps):
        loss = model(*(part.to(device) for part in batch(step, rank, world)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1}: loss {mean.item():.6f} on {world} ranks", flush=True)
        if (step + 1) % SAVE_EVERY == 0:
            barnraise.save_sharded(state, "checkpoints", step + 1, copies=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
