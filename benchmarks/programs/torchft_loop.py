"""The loop of tests/lab/session_program.py (its transformer) with torchft: a replica group of one process.

GROUP of GROUPS: whose share of the batch this is. ADDRESS: this host's. TRACE: a file that gets a line after
each commit, as BARNRAISE_TRACE_COMMITS does. DELAY: seconds per unit, which stand for compute. TIMEOUT_S,
QUORUM_TIMEOUT_S, CONNECT_TIMEOUT_S, QUORUM_RETRIES: torchft's own defaults if missing. GLOO_TIMEOUT_S: as
TIMEOUT_S if it is missing. AVERAGING: manager | ddp (torchft's own DistributedDataParallel; with Gloo its
survivors end when a peer dies). Needs no Barnraise, so that torchft can have an environment of its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from datetime import timedelta
from typing import Any

ADDRESS = os.environ["ADDRESS"]
# torchft gives the name of its host to the others; all hosts of the lab have one name, which leads nowhere.
socket.gethostname = lambda: ADDRESS

import torch  # noqa: E402
from torch._C._distributed_c10d import TCPStore  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402
from torchft import (  # type: ignore[import-not-found]  # noqa: E402
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

GROUP, GROUPS = int(os.environ["GROUP"]), int(os.environ["GROUPS"])
DELAY = float(os.environ.get("DELAY", "0"))
SAMPLES, BATCH, UNITS = 240, 24, 8
KIND = torch.float64

torch.set_num_threads(1)
torch.manual_seed(0)


class Words(torch.nn.Module):
    """A small transformer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Linear(8, 16, dtype=KIND)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, dtype=KIND)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.outside = torch.nn.Linear(16, 3, dtype=KIND)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.outside(self.layers(self.inside(x.view(-1, 8, 8))).mean(1))
        return logits


class Training:
    """State that a recovering group receives, and that is compared after each commit."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 64, dtype=KIND)
        self.y = (self.x[:, :3].abs() + self.x[:, 3:6]).argmax(1)
        self.model = Words()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 20, 0.9)
        data = TensorDataset(self.x, self.y)
        self._sampler = DistributedSampler(
            data, replica_rank=GROUP, num_replica_groups=GROUPS, group_rank=0, num_replicas=1, seed=5
        )

    def samples(self, step: int) -> list[int]:
        """Return this group's part of the batch, by the step alone, so that a recovered group trains on in
        line.
        """
        epoch, place = divmod(step, SAMPLES // BATCH)
        self._sampler.set_epoch(epoch)
        count = BATCH // GROUPS
        return list(self._sampler)[place * count : (place + 1) * count]

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def digest(self) -> str:
        hasher = hashlib.blake2b(digest_size=16)
        moments = self.optimizer.state_dict()["state"]
        tensors = [
            *self.model.state_dict().values(),
            *(moment for held in moments.values() for moment in held.values()),
        ]
        for tensor in tensors:
            hasher.update(tensor.detach().contiguous().numpy().tobytes())
        hasher.update(repr(self.scheduler.get_last_lr()).encode())
        return hasher.hexdigest()


def make_manager(training: Training, group: ProcessGroupGloo, store: TCPStore) -> Manager:
    given: dict[str, Any] = {}
    for name in ("timeout", "quorum_timeout", "connect_timeout"):
        if value := os.environ.get(f"{name.upper()}_S"):
            given[name] = timedelta(seconds=float(value))
    if value := os.environ.get("QUORUM_RETRIES"):
        given["quorum_retries"] = int(value)
    return Manager(
        pg=group,
        load_state_dict=training.load,
        state_dict=training.state,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr=ADDRESS,
        store_port=store.port,
        hostname=ADDRESS,
        replica_id=f"group_{GROUP}",
        init_sync=False,  # all begin with the same weights
        **given,
    )


def average(manager: Manager, parameters: list[torch.nn.Parameter]) -> None:
    """Reduce the gradients by one all-reduce of a single tensor, as DDP would with one bucket.

    After an error the result means nothing, and is not applied.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    together = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(together).wait()
    for gradient, part in zip(
        gradients, torch.split(together, [grad.numel() for grad in gradients]), strict=True
    ):
        gradient.copy_(part.view_as(gradient))


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    training = Training()
    seconds = os.environ.get("GLOO_TIMEOUT_S") or os.environ.get("TIMEOUT_S")
    group = ProcessGroupGloo(**({"timeout": timedelta(seconds=float(seconds))} if seconds else {}))
    store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
    manager = make_manager(training, group, store)
    is_ddp = os.environ.get("AVERAGING") == "ddp"
    model = DistributedDataParallel(manager, training.model) if is_ddp else training.model
    optimizer = Optimizer(manager, training.optimizer)
    share = UNITS // GROUPS
    own = list(range(GROUP * share, (GROUP + 1) * share))
    while True:
        chosen = training.samples(manager.current_step())
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(training.x[chosen]), training.y[chosen])
        time.sleep(DELAY * share)
        loss.backward()  # type: ignore[no-untyped-call]
        if not is_ddp:
            average(manager, list(training.model.parameters()))
        manager.wait_quorum()
        before, took_part = manager.current_step(), manager.is_participating()
        optimizer.step()
        if manager.current_step() == before:
            continue  # torchft has discarded the step
        training.scheduler.step()
        where = f"{manager._quorum_id} {GROUP} {group.size()}"
        line = f"{time.time():.6f} {manager.current_step()} {where} {training.digest()} {os.getpid()}"
        with open(os.environ["TRACE"], "a", encoding="ascii") as file:
            file.write(f"{line} {own if took_part else []}\n")


if __name__ == "__main__":
    main()
