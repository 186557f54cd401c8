"""The same fine-tuning with torch's FSDP2 on Gloo: each block is sharded over the machines.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are those of torchrun. What makes it as fast as it can be:

- One forward and one backward pass for each step, with all samples of this machine at once. SHARES has the
  samples of each machine, by rank.
- The next block is gathered while a block computes, in both passes.
- The last KEEP blocks, and the head, stay whole between their forward and their backward pass. The embedding
  is frozen, so it is gathered for the forward pass only.
- Each machine reads only its own rows of the files.

A line for each step goes to MARKS/fsdp2-RANK: its number, its loss, and the time of its end.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from blake3 import blake3
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from barnraise.training.pipeline.empty_weights import empty_weights

MARKS, BASE = Path(os.environ["MARKS"]), Path(os.environ["BASE"])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS, BATCH = int(os.environ["STEPS"]), int(os.environ["BATCH"])
SHARES = [int(share) for share in os.environ["SHARES"].split(",")]
KEEP = int(os.environ["KEEP"])

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def shard(model: nn.Module) -> None:
    """Distribute each block over all machines, and let the next one be gathered while one computes."""
    mesh = init_device_mesh("cpu", (WORLD,))
    whole: Any = model.get_base_model()  # type: ignore[operator]
    blocks = list(whole.model.layers)
    parts: list[Any] = [whole.model.embed_tokens, *blocks, whole.lm_head]
    kept = {*blocks[len(blocks) - KEEP :], whole.lm_head}
    for part in parts:
        fully_shard(part, mesh=mesh, reshard_after_forward=part not in kept)
    fully_shard(model, mesh=mesh)
    whole.model.embed_tokens.set_unshard_in_backward(False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._set_unshard_async_op(True)
    for part, following in pairwise(parts):
        part.set_modules_to_forward_prefetch([following])
    gathered = [part for part in parts[1:] if part not in kept]  # a second time, for the backward pass
    for part, before in pairwise(reversed(gathered)):
        part.set_modules_to_backward_prefetch([before])
    for part in kept:  # the first of them starts the gathering, and the others find it started
        part.set_modules_to_backward_prefetch(gathered[-1:])


def load(model: nn.Module) -> None:
    """Give memory to this machine's shards, and read them; adapters start as those of PEFT do."""
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model.to_empty(device="cpu")
    for name, value in model.named_buffers():
        value.copy_(buffers[name])
    places = {name: path for path in sorted(BASE.glob("*.safetensors")) for name in _names(path)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            sharded: Any = parameter
            own: torch.Tensor = sharded.to_local()
            rows = math.ceil(sharded.shape[0] / WORLD)
            first = min(RANK * rows, sharded.shape[0])
            if "lora_" in name:
                own.copy_(_adapter(name, sharded.shape)[first : first + len(own)])
                continue
            stored = name.removeprefix("base_model.model.").replace(".base_layer", "")
            with safe_open(places[stored], framework="pt") as file:
                own.copy_(file.get_slice(stored)[first : first + len(own)])


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _adapter(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return new weights of an adapter, which are the same on all machines."""
    value = torch.zeros(tuple(shape))
    if "lora_A" in name:
        seed = int.from_bytes(blake3(name.encode()).digest(7), "little")
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=torch.Generator().manual_seed(seed))
    return value


def main() -> None:
    dist.init_process_group("gloo")
    with empty_weights():
        config = AutoConfig.from_pretrained(BASE)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        model = get_peft_model(model, LoraConfig(r=int(os.environ["LORA_RANK"]), target_modules="all-linear"))
    model.train()
    shard(model)
    load(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=float(os.environ["LEARNING_RATE"]))
    ids = torch.from_numpy(np.load(os.environ["SAMPLES"]))
    before = sum(SHARES[:RANK])
    dist.barrier()
    for step in range(STEPS):
        own = ids[step * BATCH :][before : before + SHARES[RANK]]
        # FSDP2 divides the sum of the gradients by the number of machines.
        loss = model(input_ids=own, labels=own).loss * (len(own) / BATCH)
        (loss * WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        with open(MARKS / f"fsdp2-{RANK}", "a", encoding="ascii") as file:
            file.write(json.dumps([step + 1, total.item(), time.monotonic()]) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
