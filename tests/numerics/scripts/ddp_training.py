"""DistributedDataParallel in the shape of the torchrun tutorial: setup, sampler, trainer, snapshot.

Prints on rank 0 the loss of each step over all ranks.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Noise(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(size, 20, generator=generator)
        self.targets = self.inputs @ torch.randn(20, 1, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def ddp_setup():
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        init_process_group(backend="nccl")
    else:
        init_process_group(backend="gloo")


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.device = (
            torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")
        )
        self.model = DDP(model.to(self.device))
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.snapshot_path = snapshot_path

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, op=dist.ReduceOp.SUM)
        if self.global_rank == 0:
            print("loss", loss.item() / dist.get_world_size(), flush=True)

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self.train_data.sampler.set_epoch(epoch)
            for source, targets in self.train_data:
                self._run_batch(source.to(self.device), targets.to(self.device))
            if self.global_rank == 0 and epoch % self.save_every == 0:
                torch.save({"model": self.model.module.state_dict(), "epoch": epoch}, self.snapshot_path)


def main(options):
    ddp_setup()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    data = Noise(96)
    loader = DataLoader(data, batch_size=options.batch_size, shuffle=False, sampler=DistributedSampler(data))
    Trainer(model, loader, optimizer, 2, options.snapshot).train(options.epochs)
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--snapshot", default="snapshot.pt")
    main(parser.parse_args())
