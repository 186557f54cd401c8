"""Micro-batches of the current step: every stage loads them, and computes those of its pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from blake3 import blake3

from barnraise.checkpoint.serialization import tensor_bytes
from barnraise.core.errors import RunError
from barnraise.training.data.loader import MicroBatchLoader
from barnraise.training.device_placement import move_batch
from barnraise.training.pipeline.passes.schedule import MicroBatchWork
from barnraise.training.pipeline.stage import Stage


class LoadedStep:
    """Micro-batches of a step, which are loaded once. ``weigh``: returns the weight of a micro-batch."""

    def __init__(self, data: MicroBatchLoader, weigh: Callable[[Any], float], device: torch.device) -> None:
        self._data, self._weigh, self._device = data, weigh, device
        self._step, self._work = -1, [MicroBatchWork(0, None, 0.0, ())]
        self._shapes: dict[object, tuple[int, ...]] = {}

    @property
    def batches(self) -> int:
        """Return the micro-batches of a whole step."""
        return len(self._data.microbatches(0))

    def samples(self, step: int) -> int:
        """Return the samples of a step."""
        return sum(unit.size for unit in self._data.microbatches(step))

    def load(self, step: int, stage: Stage) -> list[MicroBatchWork]:
        """Return the micro-batches of a step that have a weight. Raise RunError if none has."""
        if self._step == step:
            return self._work
        units = self._data.microbatches(step)
        inputs = [move_batch(batch, self._device) for batch in self._data.batches(step, units)]
        weights = [float(self._weigh(each)) for each in inputs]
        total = math.fsum(weights)
        work = [
            MicroBatchWork(unit.number, each, weight / total, self._shape_of(stage, each))
            for unit, each, weight in zip(units, inputs, weights, strict=True)
            if weight > 0  # the mean over no tokens is no number
        ]
        if not work:
            raise RunError(
                f"no sample of step {step + 1} has a weight", hint="Every batch needs labels to learn from."
            )
        self._step, self._work = step, work
        return work

    def seed(self, number: int, block: int) -> None:
        """Seed by the sample's place and the block, so that no random number depends on the split."""
        unit = self._data.microbatches(self._step)[number]
        self._data.seed_microbatch(self._step, unit, block + 2)

    def fingerprint(self) -> bytes:
        """Return a hash of the samples of the loaded step."""
        hasher = blake3()
        for each in self._work:
            hasher.update(repr((each.number, each.share)).encode())
            for leaf in torch.utils._pytree.tree_leaves(each.inputs):
                if isinstance(leaf, torch.Tensor):
                    hasher.update(tensor_bytes(leaf.cpu()))
        return hasher.digest()

    def _shape_of(self, stage: Stage, inputs: Any) -> tuple[int, ...]:
        leaves = torch.utils._pytree.tree_leaves(inputs)
        key = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
        if key not in self._shapes:
            self._shapes[key] = stage.shape_of(inputs)
        return self._shapes[key]
