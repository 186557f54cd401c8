"""Aggregation of updates, chunk by chunk in constant memory: means and the outer step.

Updates of friends are merged by their weighted mean. If a stranger takes part, the largest and smallest
values of each coordinate are trimmed first. The updates of all members that came with one invite have a
bounded weight together. The outer step is Nesterov SGD as in torch.optim.SGD, with error
feedback: the quantization error is added to the next step.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from barnraise.hub.protocol.messages import VersionStep
from barnraise.hub.protocol.vector_file import MAGIC, VectorFile, VectorForm
from barnraise.hub.storage.blobs import BlobStore

_MOST_WEIGHT = 3.0  # times the median one, if a stranger takes part
_MOST_AMONG_FRIENDS = 10.0
_MOST_OF_INVITE = 3.0  # times the median one, of all members together that came with one invite
T = TypeVar("T")


class MergeInput(NamedTuple):
    """An update with its weight and the factor that scales it.

    ``invite``: the invite that its member came with; empty for a member of its own.
    """

    file: VectorFile
    weight: float
    scale: float = 1.0
    invite: str = ""
    is_strangers: bool = False


class MergeOutcome(NamedTuple):
    """The next delta, and the blobs of momentum and error feedback."""

    step: VersionStep
    momentum: str
    feedback: str


class OuterState(NamedTuple):
    """State of the outer optimizer between rounds: flat float32 files, None at first."""

    momentum: Path | None
    feedback: Path | None


def weighted_mean(rows: Iterator[tuple[torch.Tensor, float]], numel: int) -> torch.Tensor:
    """Return the weighted mean, one row at a time. Memory does not grow with the number of rows."""
    total, weights = torch.zeros(numel), 0.0
    for values, weight in rows:
        total.add_(values, alpha=weight)
        weights += weight
    return total.div_(weights)


def trimmed_mean(rows: torch.Tensor, weights: Sequence[float], trim: float) -> torch.Tensor:
    """Return the weighted mean of each column, without a fraction ``trim`` of its largest and of its smallest
    values."""
    count = rows.shape[0]
    cut = min(math.floor(trim * count), (count - 1) // 2)
    order = torch.argsort(rows, dim=0, stable=True)[cut : count - cut]
    kept = torch.gather(rows, 0, order)
    shares = torch.tensor(weights, dtype=torch.float32)[order]
    return (kept * shares).sum(dim=0).div_(shares.sum(dim=0))


def cap_weights(weights: Sequence[float], times: float = _MOST_WEIGHT) -> list[float]:
    """Cap the weights at a multiple of the median weight."""
    median = _lower_median(weights)
    return [min(weight, times * median) for weight in weights]


def cap_invites(weights: Sequence[float], invites: Sequence[str]) -> list[float]:
    """Bound the sum of the weights of all updates that came with one invite.

    The bound is three times the median weight, or the largest of these weights. So one machine keeps its
    weight, and one person with many machines does not outweigh the others.
    """
    usual_bound = _MOST_OF_INVITE * _lower_median(weights)
    totals, bounds = defaultdict[str, float](float), dict[str, float]()
    for weight, invite in zip(weights, invites, strict=True):
        totals[invite] += weight
        bounds[invite] = max(weight, bounds.get(invite, usual_bound))
    return [
        weight * min(1.0, bounds[invite] / totals[invite]) if invite and totals[invite] else weight
        for weight, invite in zip(weights, invites, strict=True)
    ]


def _lower_median(weights: Sequence[float]) -> float:
    return sorted(weights)[(len(weights) - 1) // 2]


def merge_weights(inputs: Sequence[MergeInput], trim: float | None) -> list[float]:
    """Return the weights of the updates. ``trim`` is None if only friends take part."""
    times = _MOST_AMONG_FRIENDS if trim is None else _MOST_WEIGHT
    capped = cap_weights([merge_input.weight for merge_input in inputs], times)
    return cap_invites(capped, [merge_input.invite for merge_input in inputs])


def merge_chunk(inputs: Sequence[MergeInput], index: int, trim: float | None) -> torch.Tensor:
    """Return the mean of one chunk over all updates. ``trim`` is None if only friends take part."""
    weights = merge_weights(inputs, trim)
    rows = (
        (merge_input.file.chunk(index).mul_(merge_input.scale), weight)
        for merge_input, weight in zip(inputs, weights, strict=True)
    )
    if trim is None:
        return weighted_mean(rows, inputs[0].file.form.chunk_size(index))
    return _trimmed(inputs, rows, trim)


def _trimmed(
    inputs: Sequence[MergeInput], rows: Iterable[tuple[torch.Tensor, float]], trim: float
) -> torch.Tensor:
    """Return the trimmed mean, in which all strangers that came with one invite count as one."""
    joint: dict[str, tuple[torch.Tensor, float]] = {}
    for place, (merge_input, (values, weight)) in enumerate(zip(inputs, rows, strict=True)):
        name = merge_input.invite if merge_input.is_strangers and merge_input.invite else f"update {place}"
        if name in joint:
            before, before_weight = joint[name]
            total = before_weight + weight
            values = before.mul_(before_weight / total).add_(values, alpha=weight / total)
            weight = total
        joint[name] = (values, weight)
    stacked = torch.stack([values for values, _ in joint.values()])
    return trimmed_mean(stacked, [weight for _, weight in joint.values()], trim)


def take_outer_step(
    blobs: BlobStore,
    form: VectorForm,
    mean: Callable[[int], torch.Tensor],
    outer: OuterState,
    rate: float,
    momentum: float,
    pool: Executor,
) -> MergeOutcome:
    """Compute the next delta, momentum and error feedback, and store them as blobs."""

    def work(index: int) -> tuple[bytes, bytes, bytes]:
        gradient = mean(index)
        velocity = _read_chunk(outer.momentum, form, index).mul_(momentum).add_(gradient)
        delta = (
            gradient.add(velocity, alpha=momentum).mul_(-rate).add_(_read_chunk(outer.feedback, form, index))
        )
        data = form.encode(delta, index)
        lost = delta.sub_(form.decode(data[4:], index))
        return data, velocity.numpy().tobytes(), lost.numpy().tobytes()

    with blobs.partial() as deltas, blobs.partial() as velocities, blobs.partial() as losses:
        deltas.write(MAGIC)
        for data, velocity, lost in map_in_order(pool, work, form.count):
            deltas.write(data)
            velocities.write(velocity)
            losses.write(lost)
        size = deltas.size
        step = VersionStep("delta", form.version, blobs.commit(deltas), size, form.codec.name)
        return MergeOutcome(step, blobs.commit(velocities), blobs.commit(losses))


def write_base(
    blobs: BlobStore, form: VectorForm, base: VectorFile, deltas: Sequence[VectorFile], pool: Executor
) -> VersionStep:
    """Store the state after these deltas as a new base, with the same bits that every member has."""

    def work(index: int) -> bytes:
        state = base.chunk(index)
        for delta in deltas:
            state.add_(delta.chunk(index))
        return form.encode(state, index)

    with blobs.partial() as draft:
        draft.write(MAGIC)
        for data in map_in_order(pool, work, form.count):
            draft.write(data)
        size = draft.size
        return VersionStep("base", form.version, blobs.commit(draft), size, form.codec.name)


def map_in_order(pool: Executor, work: Callable[[int], T], count: int) -> Iterator[T]:
    """Run ``work`` on all cores and yield the results in order, a bounded number ahead of the consumer."""
    ahead = 2 * (os.cpu_count() or 1)
    waiting: list[Future[T]] = [pool.submit(work, index) for index in range(min(ahead, count))]
    try:
        for index in range(count):
            result = waiting.pop(0).result()
            if index + ahead < count:
                waiting.append(pool.submit(work, index + ahead))
            yield result
    finally:
        for future in waiting:
            future.cancel()


def _read_chunk(path: Path | None, form: VectorForm, index: int) -> torch.Tensor:
    """Read a chunk of a flat float32 file; zeros if there is no file yet."""
    if path is None:
        return torch.zeros(form.chunk_size(index))
    with path.open("rb") as file:
        file.seek(4 * index * form.chunk)
        data = bytearray(file.read(4 * form.chunk_size(index)))
    return torch.frombuffer(data, dtype=torch.float32)
