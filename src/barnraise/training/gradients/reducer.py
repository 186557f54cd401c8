"""Gradient reducer: accumulates micro-batches locally, all-reduces over workers, writes ``parameter.grad``.

The local sum is never reduced in place: if the all-reduce fails, the next group continues with the local sum.
During the backward pass of a worker's last micro-batch, each bucket is sent as soon as it is complete. All
workers start the same buckets in the same order.

One more small tensor, the metadata, is summed with the gradients. It holds the total weight, by which all
workers divide, sums of the script's own, and how many workers had a gradient of each parameter. It also
counts the workers that have unfrozen a parameter. So a step's result decides, on all workers alike, what is
trained from the next step on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from blake3 import blake3

from barnraise.checkpoint.serialization import tensor_bytes
from barnraise.compression import FeedbackPart
from barnraise.core.errors import CollectiveError, ProtocolError, RunError
from barnraise.training.group.interface import PendingWork, ReduceGroup
from barnraise.training.sync import SYNC_NUMBERS, Sync

BUCKET_BYTES = 16 << 20
_DIGEST_BYTES = 1 << 20
MAX_SUMS = 17
# Layout of the metadata: the weight, how many workers must repeat the all-reduce, rank 0's next `Sync`, sums
# of the script's own, for each parameter how many workers have a gradient of it, and for each frozen one how
# many have unfrozen it.
_WEIGHT, _REPEAT = 0, 1
_SYNC = slice(2, 2 + SYNC_NUMBERS)
_SUMS = slice(_SYNC.stop, _SYNC.stop + MAX_SUMS)
_FIRST_PARAMETER = _SUMS.stop
_SUM_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

log = logging.getLogger("barnraise.training")

BufferKey = tuple[torch.dtype, torch.device]
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # a worker's own sum, and the tensor for the total


class ParameterSlice(NamedTuple):
    """The place of a parameter's gradient in the flat buffers."""

    bucket: int
    key: BufferKey
    first: int
    last: int


class GradientBucket:
    """A slice of a flat buffer that is all-reduced at once."""

    def __init__(self, key: BufferKey, first: int) -> None:
        self.key = key
        self.first = self.last = first
        self.missing: set[int] = set()  # parameters without a gradient in the current micro-batch
        self.parameters: list[int] = []


class GradientReducer:
    """Flat gradient buffers, one for each pair of dtype and device.

    ``local``: sums over this worker's micro-batches. ``total``: sums over all workers. ``frozen``: parameters
    in an optimizer that are not trained yet.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        held = list({id(parameter): parameter for parameter in parameters}.values())
        self.parameters = [parameter for parameter in held if parameter.requires_grad]
        self.frozen = [parameter for parameter in held if not parameter.requires_grad]
        if not self.parameters:
            raise RunError(
                "the model has no parameter to train",
                hint="Set requires_grad before you call prepare.",
            )
        self._bucket_bytes = bucket_bytes
        self._lay_out()
        self.norm = 0.0  # of the last gradient of a whole batch, before it was clipped
        self._overlaps = True
        self._is_dirty = False  # the local sum is not zero
        self._last: list[tuple[int, torch.Tensor]] = []  # the last micro-batch's gradients, not yet added
        self._last_weight = 0.0
        self._saved: dict[int, torch.Tensor | None] = {}  # of optimizers that have stepped before others
        self._versions: dict[int, int] = {}
        self._early_group: ReduceGroup | None = None  # set during the last micro-batch
        self._weight = 0.0
        self._in_flight: list[PendingWork] = []
        self._sending_s = 0.0  # part of backward's time that is not computation
        self._error: CollectiveError | None = None
        self._must_repeat = False  # a gradient changed after it was sent
        self._register_hooks(0)

    def _register_hooks(self, first: int) -> None:
        for number, parameter in enumerate(self.parameters[first:], first):
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, number))  # type: ignore[no-untyped-call]

    def _lay_out(self) -> None:
        """Allocate the buffers for all parameters."""
        self._buckets: list[GradientBucket] = []
        self._slices: dict[int, ParameterSlice] = {}
        self._number_of = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        sizes: dict[BufferKey, int] = {}
        open_buckets: dict[BufferKey, GradientBucket] = {}
        # Backward computes the gradients of the last layers first.
        for number in reversed(range(len(self.parameters))):
            parameter = self.parameters[number]
            key = (_SUM_DTYPES.get(parameter.dtype, parameter.dtype), parameter.device)
            first = sizes.get(key, 0)
            bucket = open_buckets.get(key)
            if bucket is None or (bucket.last - bucket.first) * key[0].itemsize >= self._bucket_bytes:
                bucket = open_buckets[key] = GradientBucket(key, first)
                self._buckets.append(bucket)
            sizes[key] = bucket.last = first + parameter.numel()
            bucket.parameters.append(number)
            self._slices[number] = ParameterSlice(self._buckets.index(bucket), key, first, bucket.last)
        self.local = {key: torch.zeros(size, dtype=key[0], device=key[1]) for key, size in sizes.items()}
        self.total = {key: torch.zeros_like(flat) for key, flat in self.local.items()}
        numbers = _FIRST_PARAMETER + len(self.parameters) + len(self.frozen)
        self.local_metadata = torch.zeros(numbers, dtype=torch.float64)
        self.total_metadata = torch.zeros_like(self.local_metadata)
        self._has_gradient = slice(_FIRST_PARAMETER, _FIRST_PARAMETER + len(self.parameters))
        self._is_unfrozen = slice(_FIRST_PARAMETER + len(self.parameters), None)

    # unfrozen parameters

    def unfrozen_here(self) -> list[torch.nn.Parameter]:
        """Return the parameters that this worker's script has unfrozen, and that are not trained yet."""
        return [parameter for parameter in self.frozen if parameter.requires_grad]

    def unfrozen_anywhere(self) -> list[torch.nn.Parameter]:
        """Return the parameters that a worker had unfrozen when the last step was all-reduced."""
        counts = self.total_metadata[self._is_unfrozen].tolist()
        return [parameter for parameter, count in zip(self.frozen, counts, strict=True) if count]

    def train_more(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Train these parameters, too, from the next step on. All workers call it at the same commit."""
        first = len(self.parameters)
        added = {id(parameter) for parameter in parameters}
        self.frozen = [parameter for parameter in self.frozen if id(parameter) not in added]
        for parameter in parameters:
            parameter.requires_grad_(True)
        self.parameters += parameters
        self._last.clear()
        self._is_dirty = False
        committed = self.total_metadata
        self._lay_out()
        self.total_metadata[:_FIRST_PARAMETER] = committed[:_FIRST_PARAMETER]  # `total_sums` is read later
        self._register_hooks(first)

    @property
    def is_on_mps(self) -> bool:
        """Return True on Apple GPUs, where two computing threads may crash (pytorch issue 197805)."""
        return any(device.type == "mps" for _, device in self.local)

    # accumulation

    def clear(self) -> None:
        """Reset the local sum to zero."""
        self._last.clear()
        if self._is_dirty:
            for flat in self.local.values():
                flat.zero_()
        self._is_dirty = False
        self.local_metadata.zero_()

    def discard_microbatch(self) -> None:
        """Drop the gradients of an unfinished micro-batch, and buckets of it that are in flight."""
        self._add_last()
        self._early_group, self._error, self._must_repeat = None, None, False
        self._in_flight.clear()
        self._versions.clear()
        self._saved.clear()

    def start_last_microbatch(self, group: ReduceGroup, weight: float) -> None:
        """Send buckets during the next backward pass, which is this worker's last of the step."""
        if not self._overlaps or self.is_on_mps:
            return
        self._early_group, self._weight = group, weight
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)

    @property
    def has_sent_gradients(self) -> bool:
        """Return True if a gradient of the last micro-batch may have been sent with its weight."""
        return self._early_group is not None and bool(self._versions)

    def set_weight(self, weight: float) -> None:
        """Set the weight of the current micro-batch."""
        self._weight = weight

    def add_sums(self, values: Sequence[float]) -> None:
        """Add numbers of the current micro-batch to those that are summed with the gradients."""
        self.local_metadata[_SUMS][: len(values)] += torch.tensor(values, dtype=torch.float64)

    def total_sums(self) -> tuple[float, list[float]]:
        """Return the weight of the whole batch, and the sums of `add_sums` over all workers."""
        return float(self.total_metadata[_WEIGHT]), self.total_metadata[_SUMS].tolist()

    def add_microbatch(self, weight: float) -> None:
        """Add the gradients of a micro-batch, which are means, times its weight.

        If buckets are in flight already, the gradients are only kept: they are rarely needed again.
        """
        self._early_group, self._last_weight = None, weight
        gradients = self.take_gradients()
        self._last += gradients
        self.local_metadata[_WEIGHT] += weight
        if weight:
            self.local_metadata[self._has_gradient][[number for number, _ in gradients]] = 1.0
        if not self._in_flight:
            self._add_last()

    def save_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Save one optimizer's gradients now, because another optimizer's backward may overwrite them."""
        known = [
            self._number_of[id(parameter)] for parameter in parameters if id(parameter) in self._number_of
        ]
        for number in known:
            self._saved[number] = self._take_gradient(number)

    def take_gradients(self) -> list[tuple[int, torch.Tensor]]:
        """Return the gradients by parameter number, and set ``grad`` of all parameters to None."""
        gradients = []
        for number, parameter in enumerate(self.parameters):
            if number in self._saved:
                gradient = self._saved[number]
                parameter.grad = None  # left by another optimizer's loss
            else:
                gradient = self._take_gradient(number)
            if gradient is not None:
                gradients.append((number, gradient))
        for parameter in self.frozen:  # it is trained when all workers know of it
            parameter.grad = None
        self._versions.clear()
        self._saved.clear()
        return gradients

    def _take_gradient(self, number: int) -> torch.Tensor | None:
        parameter = self.parameters[number]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            if number in self._versions and self._slices[number].bucket < len(self._in_flight):
                self._must_repeat = True  # zero_grad() dropped it after it was sent
        elif gradient._version != self._versions.get(number, gradient._version):
            raise RunError(
                "gradients were changed between backward() and optimizer.step()",
                hint="A micro-batch's gradient is only a part of the step's. Use run.clip_grad_norm(...) "
                "once before the loop; it clips the gradient of the whole batch.",
            )
        return gradient

    def _add_last(self) -> None:
        """Add the last micro-batch to the local sum. Skip it if its weight is 0, because it may be NaN."""
        if not self._last_weight:
            self._last.clear()
        for number, gradient in self._last:
            _, key, first, last = self._slices[number]
            flat = self.local[key]
            flat[first:last].add_(gradient.reshape(-1).to(flat.dtype), alpha=self._last_weight)
        self._is_dirty = self._is_dirty or bool(self._last)
        self._last.clear()

    def set_change(
        self, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], weight: float
    ) -> None:
        """Replace the local sum by the weighted decrease of each parameter (a pseudo-gradient)."""
        self.clear()
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            _, key, first, last = self._slices[number]
            target = self.local[key][first:last]
            target.copy_(old.detach().reshape(-1))
            target.sub_(new.detach().reshape(-1)).mul_(weight)
        self.local_metadata[_WEIGHT] = weight
        self.local_metadata[self._has_gradient] = 1.0
        self._is_dirty = True

    # all-reduce

    def all_reduce(
        self,
        group: ReduceGroup,
        extra: torch.Tensor,
        reduce_compressed: Callable[[Pairs], None] | None = None,
        next_sync: Sync | None = None,
    ) -> None:
        """Sum ``local`` over all workers into ``total``, and ``extra`` in place.

        ``reduce_compressed`` replaces the all-reduce of the gradients. ``next_sync`` is sent with the
        metadata.
        """
        own_extra = extra.clone()
        self.local_metadata[_SYNC] = 0.0 if next_sync is None else next_sync.to_tensor()
        unfrozen = [parameter.requires_grad for parameter in self.frozen]
        self.local_metadata[self._is_unfrozen] = torch.tensor(unfrozen, dtype=torch.float64)
        self._all_reduce_once(group, extra, reduce_compressed)
        if self.total_metadata[_REPEAT]:
            log.warning(
                "backward() was called more than once per batch; disabling overlap of communication with "
                "backward"
            )
            self._overlaps = self._must_repeat = False
            self._all_reduce_once(group, extra.copy_(own_extra), reduce_compressed)

    def _all_reduce_once(
        self, group: ReduceGroup, extra: torch.Tensor, reduce_compressed: Callable[[Pairs], None] | None
    ) -> None:
        works, self._in_flight = self._in_flight, []  # the next step's micro-batches may start meanwhile
        must_repeat = self._must_repeat
        try:
            if self._error is not None:
                raise self._error
            if len(works) < len(self._buckets):
                self._add_last()
            if reduce_compressed is not None:
                reduce_compressed([(flat, self.total[key]) for key, flat in self.local.items()])
            for bucket in self._buckets[len(works) :] if reduce_compressed is None else ():
                span = slice(bucket.first, bucket.last)
                self.total[bucket.key][span].copy_(self.local[bucket.key][span])
                works.append(group.all_reduce_async(self.total[bucket.key][span]))
            self.total_metadata.copy_(self.local_metadata)
            self.total_metadata[_REPEAT] = must_repeat
            works.append(group.all_reduce_async(self.total_metadata))
            if extra.numel():
                works.append(group.all_reduce_async(extra))
            for work in works:
                work.wait()
        except CollectiveError:
            for work in works:  # none may write into a buffer that is used again
                with contextlib.suppress(CollectiveError):
                    work.wait()
            raise

    def received_sync(self) -> Sync | None:
        """Return the `Sync` that rank 0 sent with the last all-reduce, or None."""
        return Sync.from_tensor(self.total_metadata[_SYNC])

    def feedback_parts(self) -> list[list[FeedbackPart]]:
        """Return the parameters of each flat buffer, in order, for error feedback."""
        parts: dict[BufferKey, list[FeedbackPart]] = {key: [] for key in self.local}
        for number, place in self._slices.items():
            parts[place.key].append(FeedbackPart(str(number), tuple(self.parameters[number].shape)))
        return list(parts.values())

    # the result

    def copy_result(self) -> list[torch.Tensor]:
        """Return a copy of the totals, before they are divided by the weight."""
        return [flat.detach().cpu().clone() for flat in (*self.total.values(), self.total_metadata)]

    def load_result(self, buffers: Sequence[torch.Tensor]) -> None:
        """Load the bytes of another worker's `copy_result`. Raise ProtocolError if they do not fit."""
        targets = (*self.total.values(), self.total_metadata)
        sizes = [target.numel() * target.element_size() for target in targets]
        if [buffer.numel() for buffer in buffers] != sizes:
            raise ProtocolError("the result of a step does not fit this model")
        for target, buffer in zip(targets, buffers, strict=True):
            target.copy_(buffer.view(target.dtype))

    def digest(self, step: int) -> bytes:
        """Hash one window of the result, a different one at each step."""
        hasher = blake3(tensor_bytes(self.total_metadata))
        for flat in self.total.values():
            width = _DIGEST_BYTES // flat.element_size()
            first = (step % max(1, -(-flat.numel() // width))) * width
            hasher.update(tensor_bytes(flat[first : first + width]))
        return hasher.digest()

    def is_finite(self) -> bool:
        """Return True if the totals contain neither infinity nor NaN."""
        return all(_is_finite(flat) for flat in self.total.values())

    def write_grads(self, clip: float | None, scale: float = 1.0) -> bool:
        """Write the mean gradient of the whole batch, divided by ``scale``, to ``parameter.grad``.

        Return False if there is none, because the batch has no weight.
        """
        if not self.total_metadata[_WEIGHT]:
            return False
        for flat in self.total.values():
            flat.mul_(1.0 / (float(self.total_metadata[_WEIGHT]) * scale))
        self.norm = 0.0 if clip is None else _norm_of(self.total.values())
        factor = _factor(self.norm, clip)
        for flat in self.total.values() if factor != 1.0 else ():
            flat.mul_(factor)
        has_gradient = self.total_metadata[self._has_gradient].tolist()
        for number, parameter in enumerate(self.parameters):
            _, key, first, last = self._slices[number]
            parameter.grad = None
            # Zeros would not do: an optimizer moves such parameters by weight decay and by momentum.
            if has_gradient[number]:
                gradient = self.total[key][first:last].view_as(parameter).to(parameter.dtype)
                parameter.grad = match_layout(parameter, gradient)
        return True

    def clear_grads(self) -> None:
        """Set ``grad`` of all parameters to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def pop_sending_s(self) -> float:
        """Return the seconds that sending gradients has added to backward() since the last call.

        Return 0 if several devices compute at once, because their times cannot be added.
        """
        seconds, self._sending_s = self._sending_s, 0.0
        return seconds if len({device for _, device in self.local}) == 1 else 0.0

    # overlap with backward

    def _on_gradient(self, number: int, parameter: torch.Tensor) -> None:
        """Handle a gradient that backward has just computed."""
        gradient = parameter.grad
        if gradient is None or number in self._saved:
            return
        if gradient.layout != torch.strided:
            raise RunError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse",
                hint="Use layers with dense gradients, such as an embedding with sparse=False.",
            )
        self._versions[number] = gradient._version
        if self._early_group is None or self._error is not None:
            return
        start = time.perf_counter()
        self._send_ready_buckets(number, gradient, self._early_group)
        self._sending_s += time.perf_counter() - start

    def _send_ready_buckets(self, number: int, gradient: torch.Tensor, group: ReduceGroup) -> None:
        """Add a gradient of the last micro-batch, and send the buckets that it completes."""
        place = self._slices[number]
        bucket = self._buckets[place.bucket]
        if place.bucket < len(self._in_flight):
            self._must_repeat = True  # backward() was called again for the same micro-batch
            return
        flat = self.local[place.key][place.first : place.last]
        # The same arithmetic as in `_add_last`, so that both give the same bits.
        total = self.total[place.key][place.first : place.last]
        own = gradient.detach().reshape(-1).to(flat.dtype)
        if not self._weight:
            total.copy_(flat)
        elif self._is_dirty:
            torch.add(flat, own, alpha=self._weight, out=total)
        else:
            torch.mul(own, self._weight, out=total)
        bucket.missing.discard(number)
        try:
            for ready in self._buckets[len(self._in_flight) :]:
                if ready.missing:
                    break
                span = self.total[ready.key][ready.first : ready.last]
                self._in_flight.append(group.all_reduce_async(span))
        except CollectiveError as error:  # raised when the step ends, not out of the user's backward()
            self._error = error


def _is_finite(flat: torch.Tensor) -> bool:
    if flat.device.type == "cpu":  # one pass without a boolean tensor, in a tenth of the time
        flat = torch.stack(torch.aminmax(flat))
    return bool(torch.isfinite(flat).all())


def match_layout(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the parameter's memory layout, which fused optimizers require."""
    if tensor.stride() == parameter.stride() or (parameter.is_contiguous() and tensor.is_contiguous()):
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def to_sum_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor to the dtype in which gradients are summed."""
    return tensor.to(_SUM_DTYPES.get(tensor.dtype, tensor.dtype))


def _norm(tensor: torch.Tensor) -> float:
    """Return the norm in float64, so that the order of additions does not change the clip factor."""
    source = tensor.cpu() if tensor.device.type == "mps" else tensor  # MPS has no float64
    return float(torch.linalg.vector_norm(source, dtype=torch.float64))


def clip_factor(tensors: Iterable[torch.Tensor], max_norm: float | None) -> float:
    """Return the factor that clips a gradient of these tensors to ``max_norm``."""
    return 1.0 if max_norm is None else _factor(_norm_of(tensors), max_norm)


def _norm_of(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(_norm(tensor) ** 2 for tensor in tensors))


def _factor(norm: float, max_norm: float | None) -> float:
    return max_norm / (norm + 1e-6) if max_norm is not None and norm > max_norm else 1.0
