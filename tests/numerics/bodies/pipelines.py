"""Pipeline schedules against the whole model in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from tests.numerics.harness import values
from tests.numerics.harness.worker import Context

MICROBATCHES = 8
WIDTH = 13


def _layers(count: int) -> list[nn.Module]:
    torch.manual_seed(77)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count)]


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def run(ctx: Context, schedule: str) -> None:
    """Gradients of this rank's stages equal those of the whole model; the last stage's losses too."""
    per_rank = 2 if schedule == "Interleaved1F1B" else 1
    count = ctx.world * per_rank
    data = values.rough_inputs("float64", 16 * WIDTH, 0, 5).reshape(16, WIDTH)
    target = values.rough_inputs("float64", 16 * WIDTH, 1, 5).reshape(16, WIDTH)
    right = nn.Sequential(*_layers(count))
    pieces = zip(data.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
    for piece, wanted in pieces:
        (_loss(right(piece), wanted) / MICROBATCHES).backward()
    own_layers = _layers(count)
    indices = [ctx.rank + ctx.world * turn for turn in range(per_rank)]
    stages = [
        PipelineStage(own_layers[index], index, count, torch.device("cpu"), group=ctx.group)
        for index in indices
    ]
    runner: Any
    if schedule == "GPipe":
        runner = ScheduleGPipe(stages[0], MICROBATCHES, loss_fn=_loss)
    elif schedule == "1F1B":
        runner = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=_loss)
    else:
        runner = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=_loss)
    for _ in range(2):  # twice: the first run also exchanges shapes
        for stage in stages:
            stage.submod.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = (data,) if ctx.rank == 0 else ()
        if ctx.rank == ctx.world - 1:
            runner.step(*inputs, target=target, losses=losses)
        else:
            runner.step(*inputs)
    for index, stage in zip(indices, stages, strict=True):
        for got, wanted in zip(stage.submod.parameters(), right[index].parameters(), strict=True):
            assert got.grad is not None
            assert wanted.grad is not None
            gap = (got.grad - wanted.grad).abs().max().item()
            ctx.check(gap < 1e-12, f"{schedule}: gradients of stage {index} are off by {gap:g}")
    if ctx.rank == ctx.world - 1:
        with torch.no_grad():
            whole_loss = _loss(right(data), target).item()
        ctx.check(abs(torch.stack(losses).mean().item() - whole_loss) < 1e-12, f"{schedule}: losses differ")
