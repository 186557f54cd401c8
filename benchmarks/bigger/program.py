"""Fine-tuning with LoRA of a Llama whose weights are in BASE, on machines with a memory limit, or alone.

GROUP: the memory control group that this process enters first; none if empty. Each process appends a line to
MARKS/pids when it starts, and after each step its number, the workers and the loss to MARKS/steps-NODE.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

MARKS = Path(os.environ["MARKS"])
NODE = os.environ.get("BARNRAISE_NODE", "alone")
if group := os.environ.get("GROUP", ""):  # before anything takes memory
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
with open(MARKS / "pids", "a", encoding="ascii") as pids:
    pids.write(f"{NODE} {os.getpid()}\n")

import time  # noqa: E402

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

import barnraise  # noqa: E402

BASE = os.environ["BASE"]
STEPS, BATCH = int(os.environ["STEPS"]), int(os.environ["BATCH"])
LENGTH = int(os.environ["LENGTH"])
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))  # after a step, while MARKS/hold exists

torch.set_num_threads(1)


def main() -> None:
    config = AutoConfig.from_pretrained(BASE)
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (STEPS * BATCH, LENGTH), generator=source)
    run = barnraise.init(seed=0, unit=1)
    with run.empty():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    split, batches = run.split(
        model,
        DataLoader(rows, batch_size=BATCH, shuffle=True),  # type: ignore[arg-type]
        weights=BASE,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    for _ in run.epochs(1):
        for batch in batches:
            start = time.perf_counter()
            loss = split.train_step(batch)
            row = [run.step, run.world, loss, time.perf_counter() - start, time.time()]
            with open(MARKS / f"steps-{NODE}", "a", encoding="ascii") as steps:
                steps.write(json.dumps(row) + "\n")
            if (MARKS / "hold").exists():
                time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
