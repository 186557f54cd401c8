"""Data loader for leased samples: the micro-batches of the positions that a hub has leased."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from torch.utils.data import DataLoader

from barnraise.core.errors import RunError
from barnraise.runs.sharding import MicroBatch, cut_micro_batches
from barnraise.training.data.loader import MicroBatchLoader, seed_microbatch
from barnraise.training.hub.parameter_server import LeasedWork, SampleRange

_MIN_MICROBATCHES = 8  # of a step, so that machines can share it by their speed


def sub_spans(spans: Sequence[SampleRange], offset: int, count: int) -> tuple[SampleRange, ...]:
    """Return the sub-spans of ``count`` positions, ``offset`` positions into the concatenated spans."""
    result = []
    for epoch, first, last in spans:
        start, end = first + max(0, offset), min(last, first + offset + count)
        if start < end:
            result.append(SampleRange(epoch, start, end))
        offset -= last - first
    return tuple(result)


class LeasedData(MicroBatchLoader):
    """Micro-batches of a lease. Positions are counted over all epochs; step numbers are ignored.

    ``offset``: committed samples of the lease. ``is_fine``: split a step into enough micro-batches for
    several machines.
    """

    def __init__(self, loader: DataLoader[Any], unit: int, seed: int, *, is_fine: bool = False) -> None:
        super().__init__(loader, unit, seed)
        self._is_fine = is_fine
        self.lease: LeasedWork | None = None  # None before the first request
        self.offset = 0

    def check(self, lease: LeasedWork) -> None:
        """Raise RunError if a lease has positions that do not exist or overlap."""
        samples, end = self.data_order.samples, (-1, 0)
        for epoch, first, last in sorted(lease.spans):
            if (epoch, first) < end or not 0 <= first < last <= samples:
                raise RunError(
                    f"the hub leased positions {first} to {last} of {samples} samples in epoch {epoch}, "
                    "which do not exist or are leased twice",
                    hint="Ask the host of the hub to run the same version of Barnraise.",
                )
            end = (epoch, last)

    @property
    def epoch(self) -> int | None:
        """Return the current epoch, or None if the training is complete."""
        return min((span.epoch for span in self.lease.spans), default=None) if self.lease is not None else 0

    @property
    def leased_samples(self) -> int:
        return sum(span.last - span.first for span in self.lease.spans) if self.lease is not None else 0

    @property
    def is_trained(self) -> bool:
        """Return True if the hub must be asked for the next lease."""
        return self.lease is None or 0 < self.leased_samples <= self.offset

    @property
    def _step_samples(self) -> int:
        """Return the samples of a step: all groups that train at once take one batch together."""
        members = self.lease.members if self.lease is not None else 1
        unit = self.data_order.micro_batch_size
        return unit * -(-max(1, self.data_order.batch // max(1, members)) // unit)

    def advance(self) -> None:
        """Count the samples of a committed step."""
        self.offset = min(self.leased_samples, self.offset + self._step_samples)

    def microbatches(self, step: int, period: int = 1) -> tuple[MicroBatch, ...]:
        microbatches: list[MicroBatch] = []
        if self.lease is None:
            return ()
        unit = self.data_order.micro_batch_size
        size = min(unit, -(-self._step_samples // _MIN_MICROBATCHES)) if self._is_fine else unit
        for epoch, first, last in sub_spans(self.lease.spans, self.offset, self._step_samples):
            start = epoch * self.data_order.samples
            microbatches += cut_micro_batches(start + first, start + last, size)
        return tuple(microbatch._replace(number=number) for number, microbatch in enumerate(microbatches))

    def steps(self, step: int, period: int) -> int:
        """Return 0: schedulers follow the samples of all groups, not the steps of this one."""
        return 0

    def may_overlap(self, step: int) -> bool:
        return False

    def is_over(self, epoch: int, done: int) -> bool:
        return self.epoch is None or self.epoch > epoch

    def batches(self, step: int, units: Sequence[MicroBatch]) -> Iterator[Any]:
        samples = self.data_order.samples
        for epoch, group in groupby(units, lambda unit: unit.first // samples):
            start = epoch * samples
            inside = [unit._replace(first=unit.first - start, last=unit.last - start) for unit in group]
            yield from super().batches(epoch * len(self), inside)

    def seed_microbatch(self, step: int, unit: MicroBatch, part: int = 0) -> None:
        """Seed by the position in the order, because other groups use the same numbers."""
        epoch, first = divmod(unit.first, self.data_order.samples)
        seed_microbatch(self.data_order.seed, epoch, unit._replace(number=first), part)
