"""Stage of a model: the model's own forward pass, in which only a run of its blocks computes.

So masks, positions and other arguments of a block come from the model itself. Modules before
the first block whose weights are elsewhere give zeros of the right shape. Blocks before ours are skipped, and
the last of them returns what the stage has received. The block after ours ends the forward pass.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from barnraise.training.pipeline.outline import BlockForm, LossFunction, ModelOutline

SeedFunction = Callable[[int], None]


class Stage:
    """The blocks ``first`` to ``end`` (excluded) of a model, which is changed in place.

    ``seed`` is called before each block with its number, and with -1 before the forward pass. So random
    numbers do not depend on the split.
    """

    def __init__(
        self, model: nn.Module, outline: ModelOutline, first: int, end: int, loss: LossFunction
    ) -> None:
        self.first, self.end = first, end
        self.busy_s = 0.0  # of forward and backward passes, without waiting for others
        self.sent_bytes = 0  # of activations and their gradients, to other machines
        self.seed: SeedFunction = lambda block: None
        self._model, self._outline, self._loss = model, outline, loss
        self._received: torch.Tensor | None = None
        self._undo: list[Callable[[], object]] = []
        blocks: Any = model.get_submodule(outline.path)
        for number in range(len(blocks)):
            if first <= number < end:
                hook = blocks[number].register_forward_pre_hook(self._seeder(number))
                self._undo.append(hook.remove)
            else:
                self._replace(blocks, str(number), _OtherBlock(blocks[number], outline.form, self, number))
        if not self.is_first:
            for path in outline.embeddings:
                parent, _, name = path.rpartition(".")
                module = _OtherModule(model.get_submodule(path), self)
                self._replace(model.get_submodule(parent), name, module)

    @property
    def is_first(self) -> bool:
        """Return True if the stage has the part before the blocks."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Return True if the stage has the part after the blocks, and so the loss."""
        return self.end == len(self._outline.blocks)

    def now(self) -> float:
        """Return the time at which the device has computed all that it was given."""
        device = self.device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    @functools.cached_property
    def device(self) -> torch.device:
        """Return the device of the stage's parameters."""
        owned = self._outline.names(self.first, self.end)
        return next(value.device for name, value in self._model.named_parameters() if name in owned)

    def __call__(self, received: torch.Tensor | None, inputs: Any) -> torch.Tensor:
        """Return the activations after the stage's last block, or the loss on the last stage."""
        self._received = received
        self.seed(-1)
        start = self.now()
        try:
            return self._loss(self._model, inputs)
        except _EndOfStage as ended:
            return ended.hidden
        finally:
            self._received = None
            self.busy_s += self.now() - start

    def shape_of(self, inputs: Any) -> tuple[int, ...]:
        """Return the shape of the activations between blocks for these inputs."""

        def end(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _EndOfStage(self._outline.form.take(args, kwargs))

        blocks: Any = self._model.get_submodule(self._outline.path)
        hook = blocks[0].register_forward_pre_hook(end, with_kwargs=True, prepend=True)
        try:
            with torch.no_grad():
                self._loss(self._model, inputs)
        except _EndOfStage as ended:
            return tuple(ended.hidden.shape)
        finally:
            hook.remove()
        raise AssertionError("the first block was not called")

    def undo(self) -> None:
        """Make the model whole again. Its weights stay where they are."""
        while self._undo:
            self._undo.pop()()

    def take_received(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        """Return what a block of another machine returns here; end the forward pass after our last block."""
        if number >= self.end:
            raise _EndOfStage(hidden)
        if number == self.first - 1:
            assert self._received is not None
            return self._received
        return hidden

    def _seeder(self, number: int) -> Callable[..., None]:
        def seed(*_: object) -> None:
            self.seed(number)

        return seed

    def _replace(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        original = getattr(parent, name)
        setattr(parent, name, module)
        self._undo.append(lambda: setattr(parent, name, original))


class _EndOfStage(asyncio.CancelledError):
    """End of the forward pass after the last block of a stage; no model's ``except Exception`` stops it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Elsewhere(nn.Module):
    """Module whose weights are on another machine. It has the attributes of the original, without weights."""

    def __init__(self, original: nn.Module, stage: Stage) -> None:
        super().__init__()
        self._kept = (original, stage)  # in a tuple, torch does not see a module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_kept"][0], name)


class _OtherBlock(_Elsewhere):
    """Block of another stage."""

    def __init__(self, original: nn.Module, form: BlockForm, stage: Stage, number: int) -> None:
        super().__init__(original, stage)
        self._form, self._number = form, number

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stage: Stage = self._kept[1]
        return self._form.give(stage.take_received(self._form.take(args, kwargs), self._number))


class _OtherModule(_Elsewhere):
    """Module before the blocks, such as an embedding: its result has the right shape, and is zero."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        original, stage = self._kept
        without = [
            tree_map_only(torch.Tensor, lambda value: value.to("meta"), part) for part in (args, kwargs)
        ]
        # Constants such as a scale, and tied weights, are on the device: they cannot meet what has no memory.
        state = {name: value.to("meta") for name, value in original.state_dict(keep_vars=True).items()}
        state |= {name: value.to("meta") for name, value in original.named_buffers()}
        shaped = functional_call(original, state, tuple(without[0]), without[1])
        device = stage.device
        return tree_map_only(torch.Tensor, lambda value: torch.zeros_like(value, device=device), shaped)
