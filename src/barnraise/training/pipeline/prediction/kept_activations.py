"""Memory that a micro-batch keeps for its backward pass, from a forward pass with tensors without memory.

A block that recomputes keeps only what it was called with. What follows the blocks is most of all the scores
of all words, whose gradients exist beside them for a moment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from barnraise.planning.split.stage_placement import ModelParts
from barnraise.training.pipeline.outline import Hooks, LossFunction, fake_pass

_MOMENT = 2.5  # times what the part after the blocks keeps, while its backward pass runs


class KeptBytes(NamedTuple):
    """Bytes of a micro-batch that a block keeps at most, and the part after the blocks."""

    block: int = 0
    after: int = 0


def measure_kept(model: nn.Module, path: str, loss: LossFunction, inputs: Any) -> KeptBytes:
    """Return what a micro-batch keeps. ``path``: of the blocks. The model was traced with the same inputs."""
    blocks = list(model.get_submodule(path).children())
    watch = _Watch()
    starts = [block.register_forward_pre_hook(watch.beginning(number)) for number, block in enumerate(blocks)]
    hooks = Hooks([*starts, blocks[-1].register_forward_hook(watch.beginning(len(blocks)))])
    with hooks, fake_pass(model, loss, inputs, lambda parameter: parameter.requires_grad) as (fakes, run):
        watch.known = {_memory_of(fake) for fake in fakes.values()}
        with torch.autograd.graph.saved_tensors_hooks(watch.keep, lambda kept: kept):
            run()
    by_block = [watch.bytes_of(number) for number in range(len(blocks))]
    return KeptBytes(max(by_block), round(_MOMENT * watch.bytes_of(len(blocks))))


def with_kept(parts: ModelParts, kept: KeptBytes) -> ModelParts:
    """Return the parts with what a micro-batch keeps; a block keeps at least what it is called with."""
    block = max(kept.block, parts.boundary_bytes)
    return parts._replace(
        blocks=tuple(each._replace(activation_bytes=block) for each in parts.blocks),
        after=parts.after._replace(activation_bytes=kept.after),
    )


class _Watch:
    """Tensors that are kept for the backward pass, by the part of the forward pass.

    ``known``: memory of parameters, which does not count.
    """

    def __init__(self) -> None:
        self.known: set[int] = set()
        self._part = -1
        self._kept: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = _memory_of(tensor)
        if memory not in self.known:
            self._kept[self._part].setdefault(memory, tensor)  # so that its number is not used again
        return tensor

    def beginning(self, part: int) -> Callable[..., None]:
        """Return a hook that is called where a part begins."""

        def begin(*_: object) -> None:
            self._part = part

        return begin

    def bytes_of(self, part: int) -> int:
        """Return the bytes that a part keeps."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept[part].values())


def _memory_of(tensor: torch.Tensor) -> int:
    """Return a number of a tensor's memory, which its views share."""
    number: int = tensor.untyped_storage()._cdata
    return number
