"""Training with more than this group: what a session needs of a hub, and the samples that one leases.

A group, of one machine or of all machines of a home, trains the samples of a lease in steps of its own, as
exact as any. What they changed is then handed over, and the model becomes what everybody has made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from barnraise.core.errors import RunError
from barnraise.runs.sharding import DataOrder, MicroBatch, cut_micro_batches
from barnraise.training.data.loader import MicroBatchLoader, seed_unit
from barnraise.training.gradients.reducer import GradientReducer
from barnraise.training.state.names_in_state import tensors_of

_FINEST = 8  # units of a step, so that a home's machines can share it by their speed


class ParameterEntry(NamedTuple):
    """One tensor within the flat vector of all that is exchanged."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class ModelSpec(NamedTuple):
    """What must be alike for everybody: the tensors, and all that the order of the samples depends on."""

    layout: tuple[ParameterEntry, ...]
    samples: int  # of an epoch
    batch: int
    seed: int
    shuffle: bool
    drop_last: bool


class SampleRange(NamedTuple):
    """Positions ``first`` to ``last`` (without it) of an epoch's order."""

    epoch: int
    first: int
    last: int


class LeasedWork(NamedTuple):
    """What this group trains until the next exchange; without spans nothing is left to train."""

    spans: tuple[SampleRange, ...]
    covered: int  # samples that everybody together has behind them
    members: int  # who train at the same time
    token: bytes = b""  # with which another process can go on with it


class RoundUpdate(NamedTuple):
    """What this group changed in a round."""

    change: torch.Tensor  # what we began with minus what we have now, flat float32
    samples: int
    loss: float | None
    speed: float  # samples per second; 0: not known


class HubPort(Protocol):
    """The others, wherever they are. Waits as long as they need, and says for whom."""

    def begin(self, form: ModelSpec, state: torch.Tensor) -> LeasedWork:
        """``state`` (flat float32) becomes everybody's; it is ours if nobody has begun and we may begin."""

    def exchange(self, handed: RoundUpdate, state: torch.Tensor) -> LeasedWork:
        """``state`` becomes what everybody made of it."""

    def go_on(self, form: ModelSpec, task: LeasedWork) -> None:
        """Another process of this group was given the task at hand."""


def within(spans: Sequence[SampleRange], place: int, count: int) -> tuple[SampleRange, ...]:
    """Of all positions of these spans, one after the other: ``count`` of them, from ``place`` on."""
    found = []
    for epoch, first, last in spans:
        begin, end = first + max(0, place), min(last, first + place + count)
        if begin < end:
            found.append(SampleRange(epoch, begin, end))
        place -= last - first
    return tuple(found)


class LeasedData(MicroBatchLoader):
    """Units of the spans that were leased. Positions are counted over all epochs; steps mean nothing.

    ``place``: how many samples of the lease are committed. ``is_fine``: a step has enough units to share.
    """

    def __init__(self, loader: DataLoader[Any], unit: int, seed: int, *, is_fine: bool = False) -> None:
        super().__init__(loader, unit, seed)
        self._is_fine = is_fine
        self.task: LeasedWork | None = None  # None: nobody has asked for one yet
        self.place = 0

    def check(self, task: LeasedWork) -> None:
        samples, end = self.course.samples, (-1, 0)
        for epoch, first, last in sorted(task.spans):
            if (epoch, first) < end or not 0 <= first < last <= samples:
                raise RunError(
                    f"the hub leased positions {first} to {last} of {samples} samples in epoch {epoch}, "
                    "which cannot be or are leased twice",
                    hint="Ask whoever hosts the hub to run the same version of Barnraise.",
                )
            end = (epoch, last)

    @property
    def epoch(self) -> int | None:
        """None: nothing is left."""
        return min((span.epoch for span in self.task.spans), default=None) if self.task is not None else 0

    @property
    def leased(self) -> int:
        return sum(span.last - span.first for span in self.task.spans) if self.task is not None else 0

    @property
    def is_trained(self) -> bool:
        """Whether the others are to be asked what is next."""
        return self.task is None or 0 < self.leased <= self.place

    @property
    def _step(self) -> int:
        """Samples of a step. So many that all who train at the same time take a batch together."""
        members = self.task.members if self.task is not None else 1
        unit = self.course.micro_batch_size
        return unit * -(-max(1, self.course.batch // max(1, members)) // unit)

    def go_forward(self) -> None:
        """A step is committed."""
        self.place = min(self.leased, self.place + self._step)

    def units(self, step: int, period: int = 1) -> tuple[MicroBatch, ...]:
        found: list[MicroBatch] = []
        if self.task is None:
            return ()
        size = (
            min(self.course.micro_batch_size, -(-self._step // _FINEST))
            if self._is_fine
            else self.course.micro_batch_size
        )
        for epoch, first, last in within(self.task.spans, self.place, self._step):
            begin = epoch * self.course.samples
            found += cut_micro_batches(begin + first, begin + last, size)
        return tuple(one._replace(number=number) for number, one in enumerate(found))

    def steps(self, step: int, period: int) -> int:
        """Schedules move when everybody's samples are known, and not with a step of this group."""
        return 0

    def may_go_ahead(self, step: int) -> bool:
        return False

    def is_over(self, epoch: int, done: int) -> bool:
        return self.epoch is None or self.epoch > epoch

    def batches(self, step: int, units: Sequence[MicroBatch]) -> Iterator[Any]:
        samples = self.course.samples
        for epoch, some in groupby(units, lambda unit: unit.first // samples):
            begin = epoch * samples
            inside = [one._replace(first=one.first - begin, last=one.last - begin) for one in some]
            yield from super().batches(epoch * len(self), inside)

    def seed_unit(self, step: int, unit: MicroBatch, part: int = 0) -> None:
        """By its place in the order: others compute units with the same numbers."""
        epoch, first = divmod(unit.first, self.course.samples)
        seed_unit(self.course.seed, epoch, unit._replace(number=first), part)


class FlatParameters:
    """All that is exchanged, as one vector of float32 numbers and back."""

    def __init__(self, model: torch.nn.Module, sums: GradientReducer) -> None:
        self._tensors = _exchanged(model, sums)
        self._sizes = [tensor.numel() for _, tensor in self._tensors]
        self.size = sum(self._sizes)

    def form(self, course: DataOrder) -> ModelSpec:
        layout = tuple(
            ParameterEntry(name, tuple(one.shape), str(one.dtype).removeprefix("torch."))
            for name, one in self._tensors
        )
        return ModelSpec(layout, course.samples, course.batch, course.seed, course.shuffle, course.drop_last)

    def read(self) -> torch.Tensor:
        """Of the model as it is."""
        found = torch.empty(self.size, dtype=torch.float32)
        for part, (_, tensor) in zip(torch.split(found, self._sizes), self._tensors, strict=True):
            part.copy_(tensor.detach().reshape(-1))
        return found

    def change(self, base: torch.Tensor) -> torch.Tensor:
        """By how much the model is lower than ``base`` was when it was written into it."""
        found = torch.empty(self.size, dtype=torch.float32)
        both = zip(torch.split(found, self._sizes), torch.split(base, self._sizes), strict=True)
        for (part, before), (_, tensor) in zip(both, self._tensors, strict=True):
            now = tensor.detach().reshape(-1).cpu()
            wide = torch.promote_types(now.dtype, torch.float32)
            part.copy_(before.to(now.dtype).to(wide) - now.to(wide))
        return found

    def write(self, flat: torch.Tensor) -> None:
        """Into the model."""
        with torch.no_grad():
            for part, (_, tensor) in zip(torch.split(flat, self._sizes), self._tensors, strict=True):
                tensor.copy_(part.view(tensor.shape))


def _exchanged(model: torch.nn.Module, sums: GradientReducer) -> list[tuple[str, torch.Tensor]]:
    """What is trained, and the statistics that follow from it; the rest is alike everywhere already.

    All that is trained is in the model's state: see `admission`.
    """
    trained = {id(one) for one in sums.parameters}
    kept = tensors_of(model, keep_vars=True)
    chosen = [(name, one) for name, one in kept.items() if id(one) in trained or _is_statistic(one)]
    seen: set[int] = set()
    return [(name, one) for name, one in chosen if id(one) not in seen and not seen.add(id(one))]  # type: ignore[func-returns-value]


def _is_statistic(tensor: torch.Tensor) -> bool:
    """A buffer that training may move. One with infinities is a mask, and has no differences to hand over."""
    is_buffer = tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter)
    return is_buffer and bool(tensor.isfinite().all())
