"""The gradients of a step: summed over units here, over members by the group, and given to the optimizer.

The local sum is never reduced in place: if the reduction breaks, it is what the next group goes on with.
During the backward pass of a member's last unit, each bucket of gradients travels as soon as it is complete;
all members start the same buckets in the same order. One more tensor has the sum of the weights, so that all
divide by the same number, and how many members had a gradient of each parameter: of none, there is none.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from blake3 import blake3

from barnraise.checkpoint.serialization import as_bytes
from barnraise.compression import FeedbackPart
from barnraise.core.errors import CollectiveError, ProtocolError, RunError
from barnraise.training.sync import NUMBERS, Sync

BUCKET_BYTES = 16 << 20
_DIGEST_BYTES = 1 << 20
_WORD = slice(2, 2 + NUMBERS)
_CAME = slice(2 + NUMBERS, None)
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

log = logging.getLogger("barnraise.training")

Kind = tuple[torch.dtype, torch.device]
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # a member's own, and what becomes the sum


class PendingWork(Protocol):
    """A sum that is on its way."""

    def wait(self) -> object: ...


class ReduceGroup(Protocol):
    """What sums over the members."""

    def begin_sum(self, tensor: torch.Tensor) -> PendingWork: ...


class ParameterSlice(NamedTuple):
    """Where a parameter's gradient lies in the flat buffers."""

    bucket: int
    kind: Kind
    first: int
    last: int


class GradientBucket:
    """A span of one flat buffer that travels as one."""

    def __init__(self, kind: Kind, first: int) -> None:
        self.kind = kind
        self.first = self.last = first
        self.missing: set[int] = set()  # parameters whose gradient has not come in this unit
        self.parameters: list[int] = []


class GradientReducer:
    """One flat buffer for all parameters of a kind: of one device, and one dtype to sum in."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        found = {id(one): one for one in parameters if one.requires_grad}
        self.parameters = list(found.values())
        if not self.parameters:
            raise RunError("the model has no parameter to train", hint="See that requires_grad is set.")
        self._buckets: list[GradientBucket] = []
        self._places: dict[int, ParameterSlice] = {}
        sizes: dict[Kind, int] = {}
        newest: dict[Kind, GradientBucket] = {}
        # The last layers' gradients come first.
        for number in reversed(range(len(self.parameters))):
            one = self.parameters[number]
            kind = (_WIDE.get(one.dtype, one.dtype), one.device)
            first = sizes.get(kind, 0)
            bucket = newest.get(kind)
            if bucket is None or (bucket.last - bucket.first) * kind[0].itemsize >= bucket_bytes:
                bucket = newest[kind] = GradientBucket(kind, first)
                self._buckets.append(bucket)
            sizes[kind] = bucket.last = first + one.numel()
            bucket.parameters.append(number)
            self._places[number] = ParameterSlice(self._buckets.index(bucket), kind, first, bucket.last)
        self.local = {kind: torch.zeros(size, dtype=kind[0], device=kind[1]) for kind, size in sizes.items()}
        self.total = {kind: torch.zeros_like(flat) for kind, flat in self.local.items()}
        self._overlaps = True
        # The weight, how many members must sum again, the first member's word on what comes next, and which
        # parameters have a gradient: given zeros, an optimizer would move them by decay and by its memory.
        self.local_weight = torch.zeros(2 + NUMBERS + len(self.parameters), dtype=torch.float64)
        self.total_weight = torch.zeros_like(self.local_weight)
        self._is_dirty = False  # whether the local sum is not zero
        self._kept: list[tuple[int, torch.Tensor]] = []  # the last unit's gradients, not yet in it
        self._kept_weight = 0.0
        self._numbers = {identity: number for number, identity in enumerate(found)}
        self._put_by: dict[int, torch.Tensor | None] = {}  # of optimizers that have stepped, others have not
        self._versions: dict[int, int] = {}
        self._circle: ReduceGroup | None = None  # while the last unit is at hand
        self._weight = 0.0
        self._travelling: list[PendingWork] = []
        self._sending_s = 0.0  # of backward's time, which is not computing
        self._broken: CollectiveError | None = None
        self._is_spoiled = False  # a gradient changed after it had left
        for number, one in enumerate(self.parameters):
            one.register_post_accumulate_grad_hook(partial(self._came, number))  # type: ignore[no-untyped-call]

    @property
    def is_on_mps(self) -> bool:
        """There, two threads that compute at once may end the process (pytorch issue 197805)."""
        return any(device.type == "mps" for _, device in self.local)

    def clear(self) -> None:
        self._kept.clear()
        if self._is_dirty:
            for flat in self.local.values():
                flat.zero_()
        self._is_dirty = False
        self.local_weight.zero_()

    def forget_unit(self) -> None:
        """No gradient of a unit is awaited, and none is on its way that anybody will ask for."""
        self.settle()
        self._circle, self._broken, self._is_spoiled = None, None, False
        self._travelling.clear()
        self._versions.clear()
        self._put_by.clear()

    def expect_last(self, circle: ReduceGroup, weight: float) -> None:
        """The unit at hand is this member's last of the step: what backward has done may travel."""
        if not self._overlaps or self.is_on_mps:
            return
        self._circle, self._weight = circle, weight
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)

    @property
    def has_begun(self) -> bool:
        """Whether a gradient of the last unit has come, with its weight."""
        return self._circle is not None and bool(self._versions)

    def weigh(self, weight: float) -> None:
        self._weight = weight

    def take(self, weight: float) -> None:
        """Add this unit's gradients, which are means over it, with its weight; and let go of them.

        Those that travel already are only kept: in nearly every step they need not be added here at all.
        """
        self._circle, self._kept_weight = None, weight
        came = self.collect()
        self._kept += came
        self.local_weight[0] += weight
        if weight:
            self.local_weight[_CAME][[number for number, _ in came]] = 1.0
        if not self._travelling:
            self.settle()

    def put_by(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """An optimizer of several has stepped: its gradients are those of now, whatever comes later."""
        for number in [self._numbers[id(one)] for one in parameters if id(one) in self._numbers]:
            self._put_by[number] = self._taken(number)

    def collect(self) -> list[tuple[int, torch.Tensor]]:
        """The gradients that backward has left, by parameter; the parameters let go of them."""
        found = []
        for number, parameter in enumerate(self.parameters):
            if number in self._put_by:
                gradient = self._put_by[number]
                parameter.grad = None  # another optimizer's loss left it
            else:
                gradient = self._taken(number)
            if gradient is not None:
                found.append((number, gradient))
        self._versions.clear()
        self._put_by.clear()
        return found

    def _taken(self, number: int) -> torch.Tensor | None:
        parameter = self.parameters[number]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            if number in self._versions and self._places[number].bucket < len(self._travelling):
                self._is_spoiled = True  # it was dropped by zero_grad() after it had left
        elif gradient._version != self._versions.get(number, gradient._version):
            raise RunError(
                "gradients were changed between backward() and optimizer.step()",
                hint="A unit's gradient is only a part of the step's. Use run.clip_grad_norm(...) once "
                "before the loop; it clips the gradient of the whole batch.",
            )
        return gradient

    def settle(self) -> None:
        """What was kept becomes part of the local sum. What weighs nothing is nothing, also if it is NaN."""
        if not self._kept_weight:
            self._kept.clear()
        for number, gradient in self._kept:
            _, kind, first, last = self._places[number]
            flat = self.local[kind]
            flat[first:last].add_(gradient.reshape(-1).to(flat.dtype), alpha=self._kept_weight)
        self._is_dirty = self._is_dirty or bool(self._kept)
        self._kept.clear()

    def fill(self, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], weight: float) -> None:
        """The local sum is this instead: by how much each parameter was lowered, with one weight."""
        self.clear()
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            _, kind, first, last = self._places[number]
            place = self.local[kind][first:last]
            place.copy_(old.detach().reshape(-1))
            place.sub_(new.detach().reshape(-1)).mul_(weight)
        self.local_weight[0] = weight
        self.local_weight[_CAME] = 1.0
        self._is_dirty = True

    def parts(self) -> list[list[FeedbackPart]]:
        """The parameters in each flat buffer, in order."""
        found: dict[Kind, list[FeedbackPart]] = {kind: [] for kind in self.local}
        for number, place in self._places.items():
            found[place.kind].append(FeedbackPart(str(number), tuple(self.parameters[number].shape)))
        return list(found.values())

    def reduce(
        self,
        circle: ReduceGroup,
        also: torch.Tensor,
        coded: Callable[[Pairs], None] | None = None,
        word: Sync | None = None,
    ) -> None:
        """``total`` becomes the sum over all members, and so does ``also``; ``local`` stays.

        ``coded`` sums the gradients in another form; ``word`` is said to all.
        """
        own = also.clone()
        self.local_weight[_WORD] = 0.0 if word is None else word.numbers()
        self._sum(circle, also, coded)
        if self.total_weight[1]:
            log.warning("backward() runs more than once for a batch: gradients travel after it from now on")
            self._overlaps = self._is_spoiled = False
            self._sum(circle, also.copy_(own), coded)

    def word(self) -> Sync | None:
        """What the first member said with the sum."""
        return Sync.read(self.total_weight[_WORD])

    def _sum(
        self,
        circle: ReduceGroup,
        also: torch.Tensor,
        coded: Callable[[Pairs], None] | None,
    ) -> None:
        travelling, self._travelling = self._travelling, []  # units of the next step may come meanwhile
        is_spoiled = self._is_spoiled
        try:
            if self._broken is not None:
                raise self._broken
            if len(travelling) < len(self._buckets):
                self.settle()
            if coded is not None:
                coded([(flat, self.total[kind]) for kind, flat in self.local.items()])
            for bucket in self._buckets[len(travelling) :] if coded is None else ():
                span = slice(bucket.first, bucket.last)
                self.total[bucket.kind][span].copy_(self.local[bucket.kind][span])
                travelling.append(circle.begin_sum(self.total[bucket.kind][span]))
            self.total_weight.copy_(self.local_weight)
            self.total_weight[1] = is_spoiled
            travelling.append(circle.begin_sum(self.total_weight))
            if also.numel():
                travelling.append(circle.begin_sum(also))
            for one in travelling:
                one.wait()
        except CollectiveError:
            for one in travelling:  # none may write into a buffer that is used again
                with contextlib.suppress(CollectiveError):
                    one.wait()
            raise

    def result(self) -> list[torch.Tensor]:
        """A copy of the sum over all members, before it is divided."""
        return [one.detach().cpu().clone() for one in (*self.total.values(), self.total_weight)]

    def take_result(self, buffers: Sequence[torch.Tensor]) -> None:
        """What `result` gave, as bytes; ProtocolError if it does not fit."""
        mine = (*self.total.values(), self.total_weight)
        sizes = [one.numel() * one.element_size() for one in mine]
        if [buffer.numel() for buffer in buffers] != sizes:
            raise ProtocolError("a result is not of this model")
        for one, buffer in zip(mine, buffers, strict=True):
            one.copy_(buffer.view(one.dtype))

    def digest(self, step: int) -> bytes:
        """Of one window of the result, another one at each step: the same bits on every member."""
        hasher = blake3(as_bytes(self.total_weight))
        for flat in self.total.values():
            width = _DIGEST_BYTES // flat.element_size()
            first = (step % max(1, -(-flat.numel() // width))) * width
            hasher.update(as_bytes(flat[first : first + width]))
        return hasher.digest()

    def is_finite(self) -> bool:
        return all(_is_finite(flat) for flat in self.total.values())

    def give(self, clip: float | None, scale: float = 1.0) -> bool:
        """The mean gradient of the whole batch becomes each parameter's; ``scale`` divides it first.

        Returns whether there is one: of a batch that weighs nothing there is none.
        """
        if not self.total_weight[0]:
            return False
        for flat in self.total.values():
            flat.mul_(1.0 / (float(self.total_weight[0]) * scale))
        factor = clipping(self.total.values(), clip)
        for flat in self.total.values() if factor != 1.0 else ():
            flat.mul_(factor)
        came = self.total_weight[_CAME].tolist()
        for number, parameter in enumerate(self.parameters):
            _, kind, first, last = self._places[number]
            parameter.grad = None
            if came[number]:
                found = self.total[kind][first:last].view_as(parameter).to(parameter.dtype)
                parameter.grad = laid_out_as(parameter, found)
        return True

    def release(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def sending_s(self) -> float:
        """How long backward was kept by what left meanwhile, since this was last asked.

        0 where gradients of several devices come at once: then their times are no sum.
        """
        found, self._sending_s = self._sending_s, 0.0
        return found if len({device for _, device in self.local}) == 1 else 0.0

    def _came(self, number: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or number in self._put_by:
            return
        if gradient.layout != torch.strided:
            raise RunError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse",
                hint="Use layers with dense gradients, such as an embedding with sparse=False.",
            )
        self._versions[number] = gradient._version
        if self._circle is None or self._broken is not None:
            return
        begin = time.monotonic()
        self._send(number, gradient, self._circle)
        self._sending_s += time.monotonic() - begin

    def _send(self, number: int, gradient: torch.Tensor, circle: ReduceGroup) -> None:
        """A gradient of the last unit, and the buckets that are complete with it."""
        place = self._places[number]
        bucket = self._buckets[place.bucket]
        if place.bucket < len(self._travelling):
            self._is_spoiled = True  # backward() was called again for the same unit
            return
        flat = self.local[place.kind][place.first : place.last]
        # As `settle` adds it, if it must, to the last bit.
        total = self.total[place.kind][place.first : place.last]
        part = gradient.detach().reshape(-1).to(flat.dtype)
        if not self._weight:
            total.copy_(flat)
        elif self._is_dirty:
            torch.add(flat, part, alpha=self._weight, out=total)
        else:
            torch.mul(part, self._weight, out=total)
        bucket.missing.discard(number)
        try:
            for ready in self._buckets[len(self._travelling) :]:
                if ready.missing:
                    break
                span = self.total[ready.kind][ready.first : ready.last]
                self._travelling.append(circle.begin_sum(span))
        except CollectiveError as error:  # it is told where the step ends, not out of the user's backward()
            self._broken = error


def _is_finite(flat: torch.Tensor) -> bool:
    if flat.device.type == "cpu":  # in one pass, which makes no tensor of truths: a tenth of the time
        flat = torch.stack(torch.aminmax(flat))
    return bool(torch.isfinite(flat).all())


def laid_out_as(parameter: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Fused optimizers take both for one row of numbers: in memory they must have the same order."""
    if found.stride() == parameter.stride() or (parameter.is_contiguous() and found.is_contiguous()):
        return found
    return torch.empty_like(parameter, dtype=found.dtype, device=found.device).copy_(found)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In the form in which gradients are added."""
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))


def _norm(tensor: torch.Tensor) -> float:
    """In float64: the order in which processors add must not show in what gradients are multiplied with."""
    found = tensor.cpu() if tensor.device.type == "mps" else tensor  # which has none
    return float(torch.linalg.vector_norm(found, dtype=torch.float64))


def clipping(tensors: Iterable[torch.Tensor], most: float | None) -> float:
    """What a gradient of these tensors is multiplied with, so that its norm is at most this."""
    if most is None:
        return 1.0
    norm = sum(_norm(one) ** 2 for one in tensors) ** 0.5
    return most / (norm + 1e-6) if norm > most else 1.0
