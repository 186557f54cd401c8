"""Schedule of one step: forward and backward passes of all micro-batches through the stages.

The runtime of ``torch.distributed.pipelining`` runs the passes in our order. Its buffers have one length for
the whole step, so micro-batches may have different shapes, and no shapes are exchanged. What travels is only
what a micro-batch has.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from barnraise.training.pipeline.passes.activations import ActivationCodec
from barnraise.training.pipeline.passes.order import Order, actions_of
from barnraise.training.pipeline.stage import Stage

_torch_log = logging.getLogger("torch.distributed.pipelining.schedules")


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
        start = stage.now()
        loss.backward()  # type: ignore[no-untyped-call]
        stage.busy_s += stage.now() - start
        total += loss.item()
    return total


def run_stage(
    stage: Stage,
    work: Sequence[MicroBatchWork],
    codec: ActivationCodec,
    seed: Callable[[int, int], None],
    ranks: Sequence[int],
    order: Order = "1F1B",
) -> float:
    """Compute the gradients of a step on this stage of the default group.

    Return the loss on the last stage, and 0 on the others. ``seed``: called with the number of a micro-batch
    and of a block before the block computes. ``ranks``: of all stages, in order; other ranks have none.
    """
    length = max(math.prod(each.shape) for each in work)
    module = _StageModule(stage, work, length, seed)
    activations = torch.empty(length, dtype=codec.dtype, device="meta", requires_grad=True)
    loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
    placed = _TravellingStage(
        module,
        ranks,
        stage.device,
        input_args=() if stage.is_first else (activations,),
        output_args=(loss if stage.is_last else activations,),
        group=dist.group.WORLD,
    )
    placed.codec = codec
    schedule = _OrderedPasses(placed, len(work), order)
    losses: list[torch.Tensor] = []
    places = torch.arange(len(work))
    try:
        with _quiet_log():
            schedule.step(place=places, target=places, losses=losses, return_outputs=False)
    finally:  # what a failed step has computed holds the blocks, also those that move to other machines
        placed.clear_runtime_states()
    return sum(each.item() for each in losses)


class _OrderedPasses(_PipelineScheduleRuntime):
    """Passes in an order of ours, with one stage on each machine."""

    def __init__(self, stage: PipelineStage, batches: int, order: Order) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            [stage], batches, loss_fn=lambda output, target: output, scale_grads=False
        )
        stages = stage.num_stages
        actions: dict[int, list[_Action | None]] = {
            place: [
                _Action(place, _ComputationType.from_str(kind), batch)
                for kind, batch in actions_of(place, stages, batches, order)
            ]
            for place in range(stages)
        }
        self._prepare_schedule_with_comms(actions, format="compute_comms")


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
        self.stage, self.work, self._length, self._seed = stage, work, length, seed

    def forward(self, *received: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        each, stage = self.work[int(place)], self.stage
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
        self.stage.seed = _seeder(self._seed, self.work[place].number)


class _TravellingStage(PipelineStage):
    """Stage of torch's schedules whose tensors travel in a form of ours.

    Its recomputed blocks draw the same random numbers. A receive gets memory for what travels. Before the
    pass that needs it, it is unpacked into the buffer that torch has made.
    """

    codec: ActivationCodec

    def __init__(self, module: nn.Module, ranks: Sequence[int], device: torch.device, **kwargs: Any) -> None:
        place = ranks.index(dist.get_rank())
        # torch wants a stage on each rank of the group. From here on, its ranks are places in the pipeline.
        super().__init__(module, place, dist.get_world_size(), device, **kwargs)
        self.num_stages = self.group_size = len(ranks)
        self.group_rank, self._ranks = place, ranks
        self._module: Any = self.submod
        self._arriving: dict[tuple[bool, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def _resolve_peer_global_rank(self, stage_idx: int) -> int:
        return self._ranks[stage_idx]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._unpack(True, fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._unpack(False, bwd_chunk_id)
        self._module.start(bwd_chunk_id)
        stage = self._module.stage
        start = stage.now()
        try:
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        finally:
            stage.busy_s += stage.now() - start

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._packed(super().get_fwd_send_ops(fwd_chunk_id), fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._packed(super().get_bwd_send_ops(bwd_chunk_id), bwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._awaited(super().get_fwd_recv_ops(fwd_chunk_id), True, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._awaited(super().get_bwd_recv_ops(bwd_chunk_id), False, bwd_chunk_id)

    def _shape(self, place: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._module.work[place].shape
        return shape

    def _packed(self, sends: list[dist.P2POp], place: int) -> list[dist.P2POp]:
        shape = self._shape(place)
        for send in sends:
            send.tensor = self.codec.pack(send.tensor[: math.prod(shape)], shape)
            self._module.stage.sent_bytes += send.tensor.nbytes
        return sends

    def _awaited(self, receives: list[dist.P2POp], is_forward: bool, place: int) -> list[dist.P2POp]:
        shape = self._shape(place)
        for receive in receives:
            values = receive.tensor.detach()[: math.prod(shape)]
            if self.codec.is_exact:
                receive.tensor = values
            else:
                receive.tensor = self.codec.buffer(shape, values.device)
                self._arriving[is_forward, place] = receive.tensor, values
        return receives

    def _unpack(self, is_forward: bool, place: int) -> None:
        if (arrived := self._arriving.pop((is_forward, place), None)) is not None:
            self.codec.unpack(*arrived, self._shape(place))


@contextlib.contextmanager
def _quiet_log() -> Iterator[None]:
    """Keep torch from printing the whole schedule when a machine is lost."""
    was_disabled, _torch_log.disabled = _torch_log.disabled, True
    try:
        yield
    finally:
        _torch_log.disabled = was_disabled


def _seeder(seed: Callable[[int, int], None], number: int) -> Callable[[int], None]:
    return lambda block: seed(number, block)
