"""Batch norm statistics: each micro-batch is normalized by itself; running statistics follow commits.

The running statistics are updated in the order of the micro-batches, so they do not depend on which worker
computed which. Before a micro-batch, a layer's statistics are zeroed and its momentum is set to one. The
layer then writes the mean and variance of that micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from barnraise.core.errors import RunError

_UNUSED = float("nan")


class BatchNormStats:
    """Running statistics of all batch norm layers of a model.

    ``microbatches``: statistics of the current step's micro-batches, by number.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.SyncBatchNorm):
                raise RunError(
                    f"{name} is a SyncBatchNorm, which communicates inside forward",
                    hint="Use an ordinary BatchNorm: here each micro-batch is normalized separately.",
                )
        tracking = (
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm) and module.running_mean is not None
        )
        self._layers: list[_BatchNorm] = list(tracking)
        self._momenta = [layer.momentum for layer in self._layers]
        self._committed: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        self._is_open = False
        self.microbatches: dict[int, list[torch.Tensor]] = {}

    @property
    def width(self) -> int:
        """Return how many numbers the statistics of one micro-batch have."""
        return sum(2 * layer.running_mean.numel() for layer in self._layers if layer.running_mean is not None)

    @property
    def buffers(self) -> set[int]:
        """Return the ids of all buffers that batch norm layers write."""
        return {id(buffer) for layer in self._layers for buffer in layer.buffers(recurse=False)}

    def start_microbatch(self, part: int = 0) -> None:
        """Prepare the layers for the forward pass of a micro-batch, or of a part of one.

        The statistics of a micro-batch in parts are the mean of its parts.
        """
        if self._is_open and part:
            for layer in self._layers:
                if layer.training:
                    layer.momentum = 1.0 / (part + 1)
        if self._is_open or not self._layers:
            return
        self._is_open = True
        self._committed = []
        for layer in self._layers:
            assert layer.running_mean is not None
            assert layer.running_var is not None
            count = None if layer.num_batches_tracked is None else layer.num_batches_tracked.clone()
            self._committed.append((layer.running_mean.clone(), layer.running_var.clone(), count))
            if layer.training:  # a frozen layer uses its statistics, and does not write them
                layer.running_mean.zero_()
                layer.running_var.zero_()
                layer.momentum = 1.0

    def finish_microbatch(self, number: int | None) -> None:
        """Store the micro-batch's statistics and restore the running ones; None discards them."""
        if not self._is_open:
            return
        self._is_open = False
        stats = []
        saved = zip(self._layers, self._committed, self._momenta, strict=True)
        for layer, (mean, var, count), momentum in saved:
            assert layer.running_mean is not None
            assert layer.running_var is not None
            tracked = layer.num_batches_tracked
            has_run = count is None or tracked is None or bool(tracked != count)
            if layer.training and has_run:
                stats += [layer.running_mean.clone(), layer.running_var.clone()]
            else:
                unused = torch.full_like(mean, _UNUSED)
                stats += [unused, unused]
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(var)
            layer.momentum = momentum
            if layer.num_batches_tracked is not None and count is not None:
                layer.num_batches_tracked.copy_(count)  # however often the layer ran
        if number is not None:
            self.microbatches[number] = stats

    @contextlib.contextmanager
    def committed(self) -> Iterator[None]:
        """Restore the committed statistics for the duration of the context."""
        saved = self._committed if self._is_open else []
        for layer, values in zip(self._layers, saved, strict=bool(saved)):
            _swap(layer, values)
        try:
            yield
        finally:
            for layer, values in zip(self._layers, saved, strict=bool(saved)):
                _swap(layer, values)

    def to_table(self, count: int) -> torch.Tensor:
        """Return this worker's statistics by micro-batch, zeros elsewhere, to be summed over workers."""
        table = torch.zeros(count, self.width, dtype=torch.float64)
        for number, stats in self.microbatches.items():
            table[number] = torch.cat([tensor.reshape(-1).to(torch.float64).cpu() for tensor in stats])
        return table

    def commit(self, table: torch.Tensor) -> None:
        """Update the running statistics with those of a step's micro-batches, in order."""
        for row in table:
            offset = 0
            for layer in self._layers:
                assert layer.running_mean is not None
                assert layer.running_var is not None
                size = layer.running_mean.numel()
                mean, var = row[offset : offset + size], row[offset + size : offset + 2 * size]
                offset += 2 * size
                if bool(torch.isnan(mean).any()):
                    continue  # frozen, or not used in that micro-batch's forward pass
                if layer.num_batches_tracked is not None:
                    layer.num_batches_tracked += 1
                count = layer.num_batches_tracked
                share = 0.1 if count is None else 1.0 / float(count)
                share = share if layer.momentum is None else layer.momentum
                for running, value in ((layer.running_mean, mean), (layer.running_var, var)):
                    running.mul_(1.0 - share).add_(value.to(running), alpha=share)
        self.microbatches.clear()


def _swap(layer: _BatchNorm, saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]) -> None:
    """Exchange a layer's statistics with saved ones."""
    current = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    for held, other in zip(current, saved, strict=True):
        if held is not None and other is not None:
            before = held.clone()
            held.copy_(other)
            other.copy_(before)
