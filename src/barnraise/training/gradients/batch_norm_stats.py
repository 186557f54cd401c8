"""Batch norms: each unit is normalised by itself; running statistics follow commits in the order of units.

So they do not depend on who computed which unit. Before a unit a layer's statistics are emptied and its
momentum set to one; what it then writes are the unit's own mean and variance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from barnraise.core.errors import RunError

_UNSEEN = float("nan")


class BatchNormStats:
    """All batch norms of a model that keep running statistics."""

    def __init__(self, model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.SyncBatchNorm):
                raise RunError(
                    f"{name} is a SyncBatchNorm, which communicates inside forward",
                    hint="Use an ordinary BatchNorm: here each unit is normalised by itself.",
                )
        kept = (
            one for one in model.modules() if isinstance(one, _BatchNorm) and one.running_mean is not None
        )
        self._layers: list[_BatchNorm] = list(kept)
        self._momenta = [layer.momentum for layer in self._layers]
        self._kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        self._open = False
        self.units: dict[int, list[torch.Tensor]] = {}

    @property
    def width(self) -> int:
        """How many numbers the statistics of one unit have."""
        return sum(2 * layer.running_mean.numel() for layer in self._layers if layer.running_mean is not None)

    @property
    def buffers(self) -> set[int]:
        """All that a layer writes, by identity."""
        return {id(one) for layer in self._layers for one in layer.buffers(recurse=False)}

    def begin(self, part: int = 0) -> None:
        """Before the forward pass of a unit, or of one part of it: its statistics are the mean of theirs."""
        if self._open and part:
            for layer in self._layers:
                if layer.training:
                    layer.momentum = 1.0 / (part + 1)
        if self._open or not self._layers:
            return
        self._open = True
        self._kept = []
        for layer in self._layers:
            assert layer.running_mean is not None
            assert layer.running_var is not None
            seen = None if layer.num_batches_tracked is None else layer.num_batches_tracked.clone()
            self._kept.append((layer.running_mean.clone(), layer.running_var.clone(), seen))
            if layer.training:  # one that is frozen uses its statistics, and writes none
                layer.running_mean.zero_()
                layer.running_var.zero_()
                layer.momentum = 1.0

    def end(self, unit: int | None) -> None:
        """After it: keep the unit's own statistics, put the running ones back. None: it does not count."""
        if not self._open:
            return
        self._open = False
        found = []
        for layer, (mean, var, seen), momentum in zip(self._layers, self._kept, self._momenta, strict=True):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            ran = seen is None or layer.num_batches_tracked is None or bool(layer.num_batches_tracked != seen)
            was_seen = layer.training and ran
            unseen = torch.full_like(mean, _UNSEEN)
            found += [layer.running_mean.clone(), layer.running_var.clone()] if was_seen else [unseen, unseen]
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(var)
            layer.momentum = momentum
            if layer.num_batches_tracked is not None and seen is not None:
                layer.num_batches_tracked.copy_(seen)  # however often it ran
        if unit is not None:
            self.units[unit] = found

    @contextlib.contextmanager
    def committed(self) -> Iterator[None]:
        """The running statistics as they were committed last, also in the middle of a unit."""
        kept = self._kept if self._open else []
        for layer, mine in zip(self._layers, kept, strict=bool(kept)):
            _swap(layer, mine)
        try:
            yield
        finally:
            for layer, mine in zip(self._layers, kept, strict=bool(kept)):
                _swap(layer, mine)

    def packed(self, units: int) -> torch.Tensor:
        """What this member has, by unit, zeros elsewhere: the sum over members has all of it."""
        table = torch.zeros(units, self.width, dtype=torch.float64)
        for unit, found in self.units.items():
            table[unit] = torch.cat([one.reshape(-1).to(torch.float64).cpu() for one in found])
        return table

    def commit(self, table: torch.Tensor) -> None:
        """Follow the units of a step, in order."""
        for row in table:
            place = 0
            for layer in self._layers:
                assert layer.running_mean is not None
                assert layer.running_var is not None
                count = layer.running_mean.numel()
                mean, var = row[place : place + count], row[place + count : place + 2 * count]
                place += 2 * count
                if bool(torch.isnan(mean).any()):
                    continue  # it is frozen, or no part of that unit's forward pass
                if layer.num_batches_tracked is not None:
                    layer.num_batches_tracked += 1
                seen = layer.num_batches_tracked
                share = 0.1 if seen is None else 1.0 / float(seen)
                share = share if layer.momentum is None else layer.momentum
                for running, value in ((layer.running_mean, mean), (layer.running_var, var)):
                    running.mul_(1.0 - share).add_(value.to(running), alpha=share)
        self.units.clear()


def _swap(layer: _BatchNorm, kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]) -> None:
    """What the layer holds, and what was kept of it."""
    for held, other in zip(
        (layer.running_mean, layer.running_var, layer.num_batches_tracked), kept, strict=True
    ):
        if held is not None and other is not None:
            before = held.clone()
            held.copy_(other)
            other.copy_(before)
