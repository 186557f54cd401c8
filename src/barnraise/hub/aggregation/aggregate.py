"""What is computed on updates, chunk by chunk in constant memory: figures, means and the outer step.

The weighted mean is for friends. With a stranger among them, each coordinate's largest and smallest values
are left out first. The outer step is Nesterov SGD, as torch.optim.SGD does it; what the codec of the result
loses is added the next time.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy
import torch

from barnraise.core.errors import ProtocolError
from barnraise.hub.aggregation.aggregator import RoundFigures
from barnraise.hub.aggregation.update_checks import SKETCH, Sketch
from barnraise.hub.protocol.messages import VersionStep
from barnraise.hub.protocol.vector_file import MAGIC, VectorFile, VectorForm
from barnraise.hub.storage.blobs import BlobStore

_LEAST_SKETCHED = 4 * SKETCH  # numbers: fewer do not tell a copy from agreement
_MOST_WEIGHT = 3.0  # times the median one, if a stranger takes part
_MOST_AMONG_FRIENDS = 10.0
T = TypeVar("T")


class MergeInput(NamedTuple):
    """An update and what it is multiplied with."""

    file: VectorFile
    weight: float
    scale: float = 1.0


class MergeOutcome(NamedTuple):
    step: VersionStep
    momentum: str
    feedback: str


class OuterState(NamedTuple):
    """What the hub remembers between rounds: flat float32 files, none at first."""

    momentum: Path | None
    feedback: Path | None


def measure(path: Path, form: VectorForm) -> RoundFigures:
    """Reads all of it. ProtocolError if it is not of the form, or holds a number that is not finite."""
    square = 0.0
    sketch = numpy.zeros(SKETCH, dtype=numpy.float32)
    for index, values in enumerate(VectorFile(path, form).chunks()):
        numbers = values.numpy()
        square += float(numpy.dot(numbers, numbers))
        sketch += _project(numbers, index)
    if not math.isfinite(square):
        raise ProtocolError("the update's norm is not finite", not_finite=True)
    return RoundFigures(math.sqrt(square), sketch.tobytes() if form.numel >= _LEAST_SKETCHED else b"")


def _project(numbers: Sketch, index: int) -> Sketch:
    """Every number added to or taken from one of the sketch's places; the same for all updates."""
    padded = numpy.zeros(-(-len(numbers) // SKETCH) * SKETCH, dtype=numpy.float32)
    numpy.multiply(numbers, _signs(index, len(numbers)), out=padded[: len(numbers)])
    total: Sketch = padded.reshape(-1, SKETCH).sum(axis=0, dtype=numpy.float32)
    return total


@functools.lru_cache(maxsize=256)
def _signs(index: int, count: int) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.int8]]:
    """1 or -1 for each number of a chunk; Philox is specified bit by bit."""
    drawn = numpy.random.Generator(numpy.random.Philox(key=index)).bytes(-(-count // 8))
    bits = numpy.unpackbits(numpy.frombuffer(drawn, dtype=numpy.uint8), count=count)
    return (1 - 2 * bits.astype(numpy.int8)).astype(numpy.int8)


def weighted_mean(rows: Iterator[tuple[torch.Tensor, float]], numel: int) -> torch.Tensor:
    """One row at a time: memory does not grow with their number."""
    total, weights = torch.zeros(numel), 0.0
    for values, weight in rows:
        total.add_(values, alpha=weight)
        weights += weight
    return total.div_(weights)


def trimmed_mean(rows: torch.Tensor, weights: Sequence[float], trim: float) -> torch.Tensor:
    """Of each column, without so much of its largest and as much of its smallest values."""
    count = rows.shape[0]
    cut = min(math.floor(trim * count), (count - 1) // 2)
    order = torch.argsort(rows, dim=0, stable=True)[cut : count - cut]
    kept = torch.gather(rows, 0, order)
    shares = torch.tensor(capped(weights), dtype=torch.float32)[order]
    return (kept * shares).sum(dim=0).div_(shares.sum(dim=0))


def capped(weights: Sequence[float], times: float = _MOST_WEIGHT) -> list[float]:
    """Nobody weighs much more than the middle one."""
    middle = sorted(weights)[(len(weights) - 1) // 2]
    return [min(one, times * middle) for one in weights]


def merge_chunk(inputs: Sequence[MergeInput], index: int, trim: float | None) -> torch.Tensor:
    """The mean of a chunk of all updates; ``trim`` is None among friends."""
    if trim is None:
        weights = capped([one.weight for one in inputs], _MOST_AMONG_FRIENDS)
        rows = (
            (one.file.chunk(index).mul_(one.scale), weight)
            for one, weight in zip(inputs, weights, strict=True)
        )
        return weighted_mean(rows, inputs[0].file.form.sizes(index))
    stacked = torch.stack([one.file.chunk(index).mul_(one.scale) for one in inputs])
    return trimmed_mean(stacked, [one.weight for one in inputs], trim)


def take_outer_step(
    blobs: BlobStore,
    form: VectorForm,
    mean: Callable[[int], torch.Tensor],
    outer: OuterState,
    rate: float,
    momentum: float,
    pool: Executor,
) -> MergeOutcome:
    """The next delta, and what the hub remembers for the one after it, as blobs."""

    def work(index: int) -> tuple[bytes, bytes, bytes]:
        gradient = mean(index)
        velocity = _read_chunk(outer.momentum, form, index).mul_(momentum).add_(gradient)
        delta = gradient.add(velocity, alpha=momentum).mul_(-rate).add_(_read_chunk(outer.feedback, form, index))
        data = form.encode(delta, index)
        lost = delta.sub_(form.decode(data[4:], index))
        return data, velocity.numpy().tobytes(), lost.numpy().tobytes()

    with blobs.drafted() as deltas, blobs.drafted() as velocities, blobs.drafted() as losses:
        deltas.write(MAGIC)
        for data, velocity, lost in map_in_order(pool, work, form.count):
            deltas.write(data)
            velocities.write(velocity)
            losses.write(lost)
        size = deltas.size
        step = VersionStep("delta", form.version, blobs.keep(deltas), size, form.codec.name)
        return MergeOutcome(step, blobs.keep(velocities), blobs.keep(losses))


def write_base(
    blobs: BlobStore, form: VectorForm, base: VectorFile, deltas: Sequence[VectorFile], pool: Executor
) -> VersionStep:
    """The state after these deltas, the same bits that every member has, as a new base."""

    def work(index: int) -> bytes:
        state = base.chunk(index)
        for delta in deltas:
            state.add_(delta.chunk(index))
        return form.encode(state, index)

    with blobs.drafted() as draft:
        draft.write(MAGIC)
        for data in map_in_order(pool, work, form.count):
            draft.write(data)
        size = draft.size
        return VersionStep("base", form.version, blobs.keep(draft), size, form.codec.name)


def map_in_order(pool: Executor, work: Callable[[int], T], count: int) -> Iterator[T]:
    """On all cores, and never many results ahead of whoever takes them."""
    ahead = 2 * (os.cpu_count() or 1)
    waiting: list[Future[T]] = [pool.submit(work, index) for index in range(min(ahead, count))]
    try:
        for index in range(count):
            result = waiting.pop(0).result()
            if index + ahead < count:
                waiting.append(pool.submit(work, index + ahead))
            yield result
    finally:
        for one in waiting:
            one.cancel()


def _read_chunk(path: Path | None, form: VectorForm, index: int) -> torch.Tensor:
    """A chunk of a flat float32 file; nothing at first."""
    if path is None:
        return torch.zeros(form.sizes(index))
    with path.open("rb") as file:
        file.seek(4 * index * form.chunk)
        data = bytearray(file.read(4 * form.sizes(index)))
    return torch.frombuffer(data, dtype=torch.float32)
