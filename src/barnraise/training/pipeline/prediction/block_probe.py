"""Probe of this machine's speed with the blocks of a model, before any stage is placed.

One block computes a micro-batch of the real shape a few times, with random weights. The stages for this are
those of a training, so masks and other arguments come from the model. The parts before and after the blocks
are measured if they are not larger than a block.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from barnraise.planning.split.stage_time import BlockSpeed
from barnraise.training.data.loader import preserved_rng
from barnraise.training.pipeline.base.narrow_layers import stored_numbers
from barnraise.training.pipeline.outline import LossFunction, ModelOutline
from barnraise.training.pipeline.stage import Stage
from barnraise.training.pipeline.weights import StageWeights

log = logging.getLogger("barnraise.training")

_ENOUGH_S = 1.5  # of one kind of stage
_REPEATS = 5
_FEWEST_BLOCKS = 3  # one of them is neither the first nor the last
_EXTRA = 4  # times the trained bytes: gradients, and room to compute


class ProbedModel(NamedTuple):
    """Model whose blocks are measured; its parameters have no memory. ``inputs``: one micro-batch."""

    model: nn.Module
    outline: ModelOutline
    weights: StageWeights
    loss: LossFunction
    inputs: Any


class _Times(NamedTuple):
    """Seconds of a stage of one block: of its block's forward pass, and of both passes."""

    block_s: float
    forward_s: float
    backward_s: float


def probe_blocks(probed: ProbedModel, memory_bytes: int) -> BlockSpeed:
    """Return the measured speed; one without figures if a block does not fit into ``memory_bytes``."""
    outline = probed.outline
    count = len(outline.blocks)
    if count < _FEWEST_BLOCKS:
        return BlockSpeed()
    middle = count // 2
    block = outline.names(middle, middle + 1)
    start = time.perf_counter()
    try:
        with preserved_rng():
            if _bytes_of(probed, block) > memory_bytes:
                return BlockSpeed()
            times = _time_stage(probed, middle)
            around_s = max(0.0, times.forward_s - times.block_s)
            speed = BlockSpeed(times.block_s, times.backward_s, around_s=around_s)
            before_s = _time_part(probed, speed, 0, outline.before, memory_bytes)
            after_s = _time_part(probed, speed, count - 1, outline.after, memory_bytes)
    except torch.OutOfMemoryError:
        log.info("a block could not be measured: the device has too little memory for it")
        return BlockSpeed()
    if after_s is None:  # its matrices take as long as those of blocks do
        after_s = speed.block_s * _numbers_of(probed, outline.after) / max(1, _numbers_of(probed, block))
    # What comes before the blocks, such as a table of embeddings, is read in places only.
    speed = speed._replace(before_s=before_s or 0.0, after_s=after_s)
    log.info("a block takes %.4f s here, measured in %.1f s", speed.block_s, time.perf_counter() - start)
    return speed


def _time_part(
    probed: ProbedModel, speed: BlockSpeed, block: int, part: Iterable[str], memory_bytes: int
) -> float | None:
    """Return the seconds of the part beside the first or the last block; None if it is large."""
    names = probed.outline.names(block, block + 1)
    block_bytes = _bytes_of(probed, probed.outline.blocks[block])
    if _bytes_of(probed, part) > block_bytes or _bytes_of(probed, names) > memory_bytes:
        return None
    times = _time_stage(probed, block)
    return max(0.0, times.forward_s + times.backward_s - speed.block_s - speed.around_s)


def _bytes_of(probed: ProbedModel, names: Iterable[str]) -> int:
    parameters = dict(probed.model.named_parameters())
    sizes = [(parameters[name].nbytes, parameters[name].requires_grad) for name in names]
    return sum(_EXTRA * size if is_trained else size for size, is_trained in sizes)


def _numbers_of(probed: ProbedModel, names: Iterable[str]) -> int:
    """Return the numbers of the weights, also of those that are held in fewer bytes."""
    places = (name.rpartition(".") for name in names)
    return sum(stored_numbers(probed.model.get_submodule(path), leaf) for path, _, leaf in places)


def _time_stage(probed: ProbedModel, block: int) -> _Times:
    """Measure the stage of one block, with weights for it alone."""
    outline, weights = probed.outline, probed.weights
    names = sorted(outline.names(block, block + 1))
    weights.load_random(names)
    stage = Stage(probed.model, outline, block, block + 1, probed.loss)
    device = stage.device
    try:
        rounds = _measure(lambda: _time_once(probed, stage))
    finally:
        stage.undo()
        weights.drop(names)
        if device.type != "cpu":
            torch.accelerator.memory.empty_cache()
    return _Times(*(statistics.median(column) for column in zip(*rounds, strict=True)))


def _measure(measure: Callable[[], _Times]) -> list[_Times]:
    """Return some measurements after a first one, which counts only if it takes long."""
    start = time.perf_counter()
    warm_up = measure()
    rounds: list[_Times] = []
    while len(rounds) < _REPEATS and time.perf_counter() - start < _ENOUGH_S:
        rounds.append(measure())
    return rounds or [warm_up]


def _time_once(probed: ProbedModel, stage: Stage) -> _Times:
    outline, device = probed.outline, stage.device
    received = None
    if not stage.is_first:
        received = torch.randn(outline.shape).to(device, outline.dtype).requires_grad_()
    inside: list[float] = []
    module: Any = probed.model.get_submodule(outline.path)
    block = module[stage.first]
    hooks = [
        block.register_forward_pre_hook(lambda *_: inside.append(-stage.now())),
        block.register_forward_hook(lambda *_: inside.append(stage.now())),
    ]
    try:
        start = stage.now()
        result = stage(received, probed.inputs)
        middle = stage.now()
    finally:
        for hook in hooks:
            hook.remove()
    block_s = sum(inside[:2])  # a recomputed block is called again in the backward pass
    if result.requires_grad:
        result.backward(torch.ones_like(result))  # type: ignore[no-untyped-call]
    return _Times(block_s, middle - start, stage.now() - middle)
