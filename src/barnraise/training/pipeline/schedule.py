"""Schedule of one step: forward and backward passes of all micro-batches through the stages.

The order is that of ``torch.distributed.pipelining``. Activations travel as flat tensors of one length for
the whole step, so micro-batches may have different shapes, and no shapes are exchanged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from barnraise.training.pipeline.stage import Stage

Order = Literal["1F1B", "GPipe"]


class MicroBatchWork(NamedTuple):
    """One micro-batch of a step. ``share``: its weight, divided by that of the whole batch.

    ``shape``: of its activations between blocks.
    """

    number: int
    inputs: Any
    share: float
    shape: tuple[int, ...]


def run_alone(stage: Stage, work: Sequence[MicroBatchWork], seed: Callable[[int, int], None]) -> float:
    """Compute the gradients of a step on a machine that has the whole model. Return the loss."""
    total = 0.0
    for each in work:
        stage.seed = _seeder(seed, each.number)
        loss = stage(None, each.inputs) * each.share
        start = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        stage.busy_s += time.perf_counter() - start
        total += loss.item()
    return total


def run_stage(
    stage: Stage,
    work: Sequence[MicroBatchWork],
    dtype: torch.dtype,
    seed: Callable[[int, int], None],
    order: Order = "1F1B",
) -> float:
    """Compute the gradients of a step on this stage of the default group.

    Return the loss on the last stage, and 0 on the others. ``seed``: called with the number of a micro-batch
    and of a block before the block computes.
    """
    length = max(math.prod(each.shape) for each in work)
    module = _StageModule(stage, work, length, seed)
    activations = torch.empty(length, dtype=dtype, device="meta", requires_grad=True)
    loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
    placed = _SeededStage(
        module,
        dist.get_rank(),
        dist.get_world_size(),
        stage.device,
        input_args=() if stage.is_first else (activations,),
        output_args=(loss if stage.is_last else activations,),
        group=dist.group.WORLD,
    )
    # 1F1B needs a micro-batch for each stage; the last batch of an epoch may have fewer.
    kind = Schedule1F1B if order == "1F1B" and len(work) >= dist.get_world_size() else ScheduleGPipe
    schedule = kind(placed, len(work), loss_fn=lambda output, target: output, scale_grads=False)
    losses: list[torch.Tensor] = []
    places = torch.arange(len(work))
    schedule.step(place=places, target=places, losses=losses, return_outputs=False)
    return sum(each.item() for each in losses)


class _StageModule(nn.Module):
    """A stage as torch's schedules call it: with the place of a micro-batch, of which all have the data."""

    def __init__(
        self,
        stage: Stage,
        work: Sequence[MicroBatchWork],
        length: int,
        seed: Callable[[int, int], None],
    ) -> None:
        super().__init__()
        self.stage, self._work, self._length, self._seed = stage, work, length, seed

    def forward(self, *received: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        each, stage = self._work[int(place)], self.stage
        self.start(int(place))
        own = received[0][: math.prod(each.shape)].view(each.shape) if received else None
        result = stage(own, each.inputs)
        if stage.is_last:
            return (result * each.share).float()
        if not result.requires_grad:  # nothing is trained up to here, but the schedule sends a gradient back
            result = result.detach().requires_grad_()
        flat = result.reshape(-1)
        return nn.functional.pad(flat, (0, self._length - flat.numel()))

    def start(self, place: int) -> None:
        """Let blocks draw the random numbers of this micro-batch, also when they compute it again."""
        self.stage.seed = _seeder(self._seed, self._work[place].number)


class _SeededStage(PipelineStage):
    """Stage of torch's schedules whose recomputed blocks draw the same random numbers."""

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.submod
        module.start(bwd_chunk_id)
        start = time.perf_counter()
        try:
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        finally:
            module.stage.busy_s += time.perf_counter() - start

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        stage: Any = self.submod.stage
        stage.sent_bytes += sum(send.tensor.nbytes for send in sends)
        return sends


def _seeder(seed: Callable[[int, int], None], number: int) -> Callable[[int], None]:
    return lambda block: seed(number, block)
