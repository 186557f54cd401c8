"""Fine-tuning with LoRA of the Llama in the folder BASE: split over machines, or alone without an agent.

Each process writes below MARKS, with times of CLOCK_MONOTONIC:

- ``ready``: a line when it has imported everything and is about to split the model.
- ``steps-PLACE``: a line for each committed step, with the values of `benchmarks.bigger.figures.Row`.
- ``calls-PLACE``: name, start and end of each call that joined a group or loaded weights.

While MARKS/pause exists, it waits between two steps. It ends after the step whose number is in MARKS/last.
"""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

import barnraise
from barnraise.core import metrics
from barnraise.core.metrics import catalogue
from barnraise.training.pipeline.weights import StageWeights

MARKS, BASE = Path(os.environ["MARKS"]), os.environ["BASE"]
PLACE = os.environ.get("PLACE", "alone")  # name of the host
STEPS, BATCH = int(os.environ["STEPS"]), int(os.environ["BATCH"])

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def note(name: str, values: list[Any]) -> None:
    """Append a line to a file of this machine; its last line may be cut off by a kill."""
    with open(MARKS / f"{name}-{PLACE}", "a", encoding="ascii") as file:
        file.write(json.dumps(values) + "\n")


def watch(owner: Any, name: str) -> None:
    """Note the start and the end of each call of a function."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def timed(*args: Any) -> Any:
        start = time.monotonic()
        try:
            return inner(*args)
        finally:
            note("calls", [name, start, time.monotonic()])

    setattr(owner, name, timed)


def trained_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of what this machine trains, with both moments of Adam."""
    values = [value for value in model.parameters() if value.requires_grad and not value.is_meta]
    return sum(3 * value.numel() * value.element_size() for value in values)


def busy_seconds(split: Any) -> float:
    """Return the seconds that this machine computed in the newest step; 0 without a stage."""
    stage = split.loop._held.stage
    return float(stage.busy_s) if stage is not None else 0.0


def moved_bytes(kind: str) -> int:
    """Return the bytes of trained state that this process has received because blocks moved."""
    name = catalogue.MOVED_STATE_BYTES.name
    samples = [each for each in metrics.registry.samples() if each.name == name and kind in each.labels]
    return int(sum(each.value for each in samples))


def predicted_seconds(split: Any) -> float | None:
    """Return the seconds that a step should take in the newest placement; None if no speed is known."""
    plan = split.loop.forecast.plan
    return float(plan.step.step_s) if plan is not None else None


def main() -> None:
    rows = torch.from_numpy(np.load(os.environ["SAMPLES"]))[: STEPS * BATCH]
    run = barnraise.init(seed=0, unit=1)
    watch(run._manager, "join_next_group")
    watch(StageWeights, "load")
    with run.empty():
        config = AutoConfig.from_pretrained(BASE)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model = get_peft_model(model, LoraConfig(r=int(os.environ["LORA_RANK"]), target_modules="all-linear"))
    with open(MARKS / "ready", "a", encoding="ascii") as file:
        file.write(f"{PLACE} {os.getpid()}\n")
    split, batches = run.split(
        model,
        DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=BATCH),  # type: ignore[arg-type]
        weights=BASE,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=float(os.environ["LEARNING_RATE"])),
    )
    last = MARKS / "last"
    for _ in run.epochs(1):
        for batch in batches:
            loss = split.train_step(batch)
            place = [run.step, run._manager.generation, run.world]
            sizes = [
                trained_bytes(model),
                moved_bytes("stage"),
                predicted_seconds(split),
                moved_bytes("mirror"),
            ]
            note("steps", [*place, loss, busy_seconds(split), time.monotonic(), *sizes])
            if last.exists() and run.step >= int(last.read_text()):
                return
            while (MARKS / "pause").exists():
                time.sleep(0.05)


if __name__ == "__main__":
    main()
