"""Synchronised batch normalisation over the batches of all ranks, on any device.

torch's own ``SyncBatchNorm`` refuses CPU and MPS tensors. This one needs only arithmetic from a device, and
only ``all_gather`` and ``all_reduce`` from the group. It runs on every backend.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from barnraise.core.errors import UnsupportedOperation


class SyncBatchNorm(_BatchNorm):
    """``BatchNorm1d/2d/3d`` with the statistics of all ranks' batches together. Batch sizes may differ.

    Outputs, input gradients and running statistics equal those of one process that holds the whole batch.
    The gradients of weight and bias are this rank's part of the sum, as DDP expects them. Without a process
    group, and in evaluation, it is ordinary batch normalisation.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            eps=eps,
            momentum=momentum,
            affine=affine,
            track_running_stats=track_running_stats,
            device=device,
            dtype=dtype,
        )
        self.process_group = process_group

    @classmethod
    def convert(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Replace every batch normalisation inside ``module``, and ``module`` itself if it is one. Return it.

        Parameters and buffers are reused, not copied, so an existing optimizer stays valid.
        """
        if isinstance(module, _BatchNorm):
            return cls._from(module, process_group)
        for name, child in module.named_children():
            converted = cls.convert(child, process_group)
            if converted is not child:
                setattr(module, name, converted)
        return module

    @classmethod
    def _from(cls, norm: _BatchNorm, process_group: dist.ProcessGroup | None) -> SyncBatchNorm:
        if isinstance(norm, _LazyNormBase):
            raise UnsupportedOperation(
                "a lazy batch normalisation has no size yet, so it cannot be converted",
                hint="Run one batch through the model first, then convert it.",
            )
        result = cls(
            norm.num_features,
            norm.eps,
            norm.momentum,
            affine=False,
            track_running_stats=False,
            process_group=process_group,
        )
        result.affine, result.track_running_stats = norm.affine, norm.track_running_stats
        result.weight, result.bias = norm.weight, norm.bias
        # Registered, not assigned: a buffer that was None must stay a buffer.
        result.register_buffer("running_mean", norm.running_mean)
        result.register_buffer("running_var", norm.running_var)
        result.register_buffer("num_batches_tracked", norm.num_batches_tracked)
        result.training = norm.training
        return result

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions (batch, channels, ...), got {input.dim()}")
        if input.size(1) != self.num_features:
            raise ValueError(f"expected {self.num_features} channels, got {input.size(1)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input`` (batch, channels, ...)."""
        if not self._synchronises():
            return super().forward(input)
        self._check_input_dim(input)
        apply = cast(Any, _Normalise.apply)
        output, mean, variance, total = apply(input, self.weight, self.bias, self.eps, self.process_group)
        if self.track_running_stats:
            self._track(mean, variance, float(total))
        return cast(Tensor, output)

    def _synchronises(self) -> bool:
        if not self.training or not dist.is_available() or not dist.is_initialized():
            return False
        return dist.get_world_size(self.process_group) > 1

    def _track(self, mean: Tensor, variance: Tensor, total: float) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        with torch.no_grad():
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            share = self.momentum
            if share is None:  # a plain average over all batches so far
                share = 1.0 / float(self.num_batches_tracked)
            unbiased = variance * (total / (total - 1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


class _Normalise(torch.autograd.Function):
    """Normalisation with the statistics of all ranks, differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = _wide(input.dtype)
        values = input.to(wide)
        mean, variance, total = _statistics(values, group)
        scale = torch.rsqrt(variance + eps)
        normalised = (values - _spread(mean, input)) * _spread(scale, input)
        output = normalised
        if weight is not None:
            output = output * _spread(weight.to(wide), input)
        if bias is not None:
            output = output + _spread(bias.to(wide), input)
        ctx.save_for_backward(input, weight, mean, scale, total)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(input.dtype), mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, scale, total = ctx.saved_tensors
        wide = mean.dtype
        reduced = _reduced_dimensions(input)
        gradient = gradient.to(wide)
        normalised = (input.to(wide) - _spread(mean, input)) * _spread(scale, input)
        sums = torch.stack([gradient.sum(reduced), (gradient * normalised).sum(reduced)])
        for_weight = sums[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        for_bias = sums[0].to(weight.dtype) if ctx.needs_input_grad[2] else None
        for_input = None
        if ctx.needs_input_grad[0]:
            global_sums = sums.clone()
            dist.all_reduce(global_sums, group=ctx.group)
            averages = global_sums / total
            centred = gradient - _spread(averages[0], input) - normalised * _spread(averages[1], input)
            factor = scale if weight is None else scale * weight.to(wide)
            for_input = (centred * _spread(factor, input)).to(input.dtype)
        return for_input, for_weight, for_bias, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the sums: float32 for half types, because MPS has no wider one."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _reduced_dimensions(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _spread(per_channel: Tensor, input: Tensor) -> Tensor:
    """Return one number per channel in a shape that broadcasts with ``input``."""
    return per_channel.reshape(1, -1, *([1] * (input.dim() - 2)))


def _statistics(values: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and number of values per channel over all ranks.

    Ranks exchange their own mean and squared deviations from it (Chan's formula). Sums of squares would
    lose the variance of a channel whose mean is large. All ranks combine the same numbers in the same
    order, so the result is bitwise equal everywhere. A rank with an empty batch has no weight.
    """
    channels = values.size(1)
    count = values.numel() // channels if channels else 0
    own = values.new_zeros(2 * channels + 1)
    if count:
        variance, mean = torch.var_mean(values, dim=_reduced_dimensions(values), correction=0)
        own[:channels], own[channels:-1] = mean, variance * count
    own[-1] = count
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    rows = torch.stack(gathered)
    counts = rows[:, -1:]
    total = counts.sum()
    if float(total) < 2:
        raise ValueError(f"expected more than 1 value per channel over all ranks, got {int(total)}")
    means, deviations = rows[:, :channels], rows[:, channels:-1]
    mean = (means * counts).sum(0) / total
    variance = (deviations + counts * (means - mean) ** 2).sum(0) / total
    return mean, variance, total
