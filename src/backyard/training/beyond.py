"""Training with more than this group: what a session needs of a hub, and how its rounds follow one.

A round of the hub is one step of the session, as any round of local steps is. Its units are those that the
hub has leased to us, and what we changed is not applied here but handed over: the model then becomes what
everybody has made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch.utils.data import DataLoader

from backyard.core.errors import RunError
from backyard.runs.leases import Unit, cut
from backyard.training.data import Units, seed_unit
from backyard.training.state import TrainingState
from backyard.training.sums import Sums
from backyard.training.sync import Sync


class Entry(NamedTuple):
    """One tensor within the flat vector of all that is exchanged."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Form(NamedTuple):
    """What must be alike for everybody: the tensors, and all that the order of the samples depends on."""

    layout: tuple[Entry, ...]
    samples: int  # of an epoch
    batch: int
    seed: int
    shuffle: bool
    drop_last: bool


class Span(NamedTuple):
    """Positions ``first`` to ``last`` (without it) of an epoch's order."""

    epoch: int
    first: int
    last: int


class Task(NamedTuple):
    """What this group trains until the next exchange; without spans nothing is left to train."""

    spans: tuple[Span, ...]
    covered: int  # samples that everybody together has behind them
    members: int  # who train at the same time


class Handed(NamedTuple):
    """What this group changed in a round."""

    change: torch.Tensor  # what we began with minus what we have now, flat float32
    samples: int
    loss: float | None
    speed: float  # samples per second; 0: not known


class Beyond(Protocol):
    """The others, wherever they are. Waits as long as they need, and says for whom."""

    def begin(self, form: Form, state: torch.Tensor) -> Task:
        """``state`` (flat float32) becomes everybody's; it is ours if nobody has begun and we may begin."""

    def exchange(self, handed: Handed, state: torch.Tensor) -> Task:
        """``state`` becomes what everybody made of it."""


class Leased(Units):
    """Units of the spans that were leased. Positions are counted over all epochs; steps mean nothing."""

    def __init__(self, loader: DataLoader[Any], unit: int, seed: int) -> None:
        super().__init__(loader, unit, seed)
        self.task = Task((), 0, 1)

    def take(self, task: Task) -> None:
        samples, end = self.course.samples, (-1, 0)
        for epoch, first, last in sorted(task.spans):
            if (epoch, first) < end or not 0 <= first < last <= samples:
                raise RunError(
                    f"the hub leased positions {first} to {last} of {samples} samples in epoch {epoch}, "
                    "which cannot be or are leased twice",
                    hint="Ask whoever hosts the hub to run the same version of Backyard.",
                )
            end = (epoch, last)
        self.task = task

    @property
    def epoch(self) -> int | None:
        """None: nothing is left."""
        return min((span.epoch for span in self.task.spans), default=None)

    @property
    def leased(self) -> int:
        return sum(span.last - span.first for span in self.task.spans)

    def units(self, step: int, period: int = 1) -> tuple[Unit, ...]:
        found: list[Unit] = []
        for epoch, first, last in self.task.spans:
            begin = epoch * self.course.samples
            found += cut(begin + first, begin + last, self.course.unit)
        return tuple(one._replace(number=number) for number, one in enumerate(found))

    def steps(self, step: int, period: int) -> int:
        return max(1, self.leased // self.course.batch)

    def is_over(self, epoch: int, done: int) -> bool:
        return self.epoch is None or self.epoch > epoch

    def batches(self, step: int, units: Sequence[Unit]) -> Iterator[Any]:
        samples = self.course.samples
        for epoch, some in groupby(units, lambda unit: unit.first // samples):
            begin = epoch * samples
            within = [one._replace(first=one.first - begin, last=one.last - begin) for one in some]
            yield from super().batches(epoch * len(self), within)

    def seed_unit(self, step: int, unit: Unit, part: int = 0) -> None:
        """By its place in the order: others compute units with the same numbers."""
        epoch, first = divmod(unit.first, self.course.samples)
        seed_unit(self.course.seed, epoch, unit._replace(number=first), part)


class Outward:
    """The model's side of it: flat and back, and what a lease means for the session's own state."""

    def __init__(
        self,
        beyond: Beyond,
        sums: Sums,
        data: Leased,
        state: TrainingState,
        speed: Callable[[], float],
    ) -> None:
        self._beyond, self._sums, self._data, self._state = beyond, sums, data, state
        self._speed = speed
        self.loss: Callable[[], float | None] = lambda: None
        self._tensors = _exchanged(state.model, sums)
        self._parameters = {id(one) for one in sums.parameters}
        size = sum(tensor.numel() for _, tensor in self._tensors)
        self._flat = torch.empty(size, dtype=torch.float32)
        self._change = torch.empty_like(self._flat)

    def begin(self) -> int:
        """How many batches everybody has behind them."""
        course = self._data.course
        layout = tuple(
            Entry(name, tuple(one.shape), str(one.dtype).removeprefix("torch."))
            for name, one in self._tensors
        )
        form = Form(layout, course.samples, course.batch, course.seed, course.shuffle, course.drop_last)
        for part, (_, tensor) in zip(self._parts(self._flat), self._tensors, strict=True):
            part.copy_(tensor.detach().reshape(-1))
        self._take(self._beyond.begin(form, self._flat))
        self._state.epoch = self._data.epoch or 0
        return self._data.task.covered // course.batch

    def exchange(self) -> int:
        """The gradients are the mean change of our group; returns how many batches have gone by elsewhere."""
        was = self._data.task.covered // self._data.course.batch
        both = zip(self._parts(self._change), self._parts(self._flat), self._tensors, strict=True)
        for part, base, (_, tensor) in both:
            if id(tensor) in self._parameters:
                assert tensor.grad is not None
                part.copy_(tensor.grad.detach().reshape(-1))
            else:
                torch.sub(base, tensor.detach().reshape(-1).to(base), out=part)
        handed = Handed(self._change, self._data.leased, self.loss(), self._speed())
        self._take(self._beyond.exchange(handed, self._flat))
        return max(0, self._data.task.covered // self._data.course.batch - was)

    def _take(self, task: Task) -> None:
        self._data.take(task)
        with torch.no_grad():
            for part, (_, tensor) in zip(self._parts(self._flat), self._tensors, strict=True):
                tensor.copy_(part.view(tensor.shape))
        inner = max(1, self._data.course.batch // max(1, task.members))
        local = self._state.sync if self._state.sync.is_local else Sync(period=2, inner=inner)
        self._state.adopt(msgspec.structs.replace(local, inner=inner))

    def _parts(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(flat, [tensor.numel() for _, tensor in self._tensors])


def _exchanged(model: torch.nn.Module, sums: Sums) -> list[tuple[str, torch.Tensor]]:
    """What is trained, and the statistics that follow from it; the rest is alike everywhere already."""
    trained = {id(one) for one in sums.parameters}
    kept = model.state_dict(keep_vars=True)
    chosen = [
        (name, one)
        for name, one in kept.items()
        if isinstance(one, torch.Tensor) and (id(one) in trained or _is_statistic(one))
    ]
    seen: set[int] = set()
    unique = [(name, one) for name, one in chosen if id(one) not in seen and not seen.add(id(one))]  # type: ignore[func-returns-value]
    missing = trained - seen
    if missing:
        raise RunError(
            f"{len(missing)} parameters are trained that are not in the model's state",
            hint="Give prepare the model that holds all parameters of its optimizers.",
        )
    return unique


def _is_statistic(tensor: torch.Tensor) -> bool:
    """A buffer that training may move. One with infinities is a mask, and has no differences to hand over."""
    is_buffer = tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter)
    return is_buffer and bool(tensor.isfinite().all())
