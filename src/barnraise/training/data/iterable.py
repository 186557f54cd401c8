"""Iterable datasets: every worker reads all items and computes its own micro-batches of them.

If the dataset yields the same items in the same order on every machine, each sample counts exactly once. That
cannot be verified; only the number of samples of a step is compared at every commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from barnraise.runs.sharding import MicroBatch, cut_micro_batches
from barnraise.training.data.loader import (
    batch_size_of,
    preserved_rng,
    seed_all,
    seed_microbatch,
    seed_of_sample,
)
from barnraise.training.state.training_state import TrainingState

log = logging.getLogger("barnraise.training")

_REPORT_S = 10.0


def _identity(item: Any) -> Any:
    return item


class IterableLoader:
    """Micro-batches of an iterable dataset; ``state`` knows the current epoch and its first step."""

    def __init__(self, loader: DataLoader[Any], unit: int, seed: int, state: TrainingState) -> None:
        self._loader = loader
        self._batch = batch_size_of(loader)
        self._unit = min(unit, self._batch)
        self._seed = seed
        self._state = state
        self._epoch = -1
        self._items: Iterator[Any] = iter(())
        self._at = 0  # items of the epoch that were read
        self._current: tuple[int, list[Any]] = (-1, [])  # the current step's position and items

    def __len__(self) -> int:
        raise TypeError("an iterable dataset has no length; count steps with run.step")

    @property
    def batch(self) -> int:
        return self._batch

    def microbatches(self, step: int, period: int = 1) -> tuple[MicroBatch, ...]:
        """Return the micro-batches of a round; none if the epoch is over."""
        first, items = self._read(step, period)
        return cut_micro_batches(first, first + len(items), self._unit)

    def steps(self, step: int, period: int) -> int:
        return -(-len(self._read(step, period)[1]) // self._batch)

    def may_overlap(self, step: int) -> bool:
        """Return False: only the current step has been read."""
        return False

    def is_over(self, epoch: int, done: int) -> bool:
        if epoch != self._state.epoch:
            return epoch < self._state.epoch
        return not self._read(done)[1]

    def batches(self, step: int, spans: Sequence[MicroBatch]) -> Iterator[Any]:
        first, items = self._read(step)
        for span in spans:
            with preserved_rng():
                batch = self._loader.collate_fn(items[span.first - first : span.last - first])
            yield batch

    def catch_up(self, step: int) -> None:
        """Read everything before a step, and the step, before other workers wait for this one."""
        self._read(step)

    def seed_microbatch(self, step: int, unit: MicroBatch, part: int = 0) -> None:
        seed_microbatch(self._seed, step, unit, part)

    def _read(self, step: int, period: int = 1) -> tuple[int, list[Any]]:
        """Return the position in the epoch and the items of one or more steps."""
        first = (step - self._state.epoch_start) * self._batch
        if self._epoch != self._state.epoch or first < min(self._at, self._current[0]):
            self._open()
        if self._current[0] != first:
            self._skip_to(first)
            self._current = (first, [])
        items = self._current[1]
        while len(items) < period * self._batch:
            with preserved_rng():
                more = [item for _ in range(self._batch) for item in self._next()]
            if self._loader.drop_last and len(more) < self._batch:
                more = []
            if not more:
                break
            items += more
        return first, items

    def _skip_to(self, first: int) -> None:
        """Read the items that the other workers had, and drop them."""
        start = reported = time.monotonic()
        with preserved_rng():
            for at in range(self._at, first):
                self._next()
                now = time.monotonic()
                if now - reported > _REPORT_S:
                    reported = now
                    text = "reading the stream for %.0f s to catch up with the training: %d of %d items"
                    log.warning(text, now - start, at, first)

    def _next(self) -> list[Any]:
        seed_all(seed_of_sample(self._seed, self._epoch, self._at))
        self._at += 1
        for item in self._items:
            return [item]
        return []

    def _open(self) -> None:
        self._epoch, self._at, self._current = self._state.epoch, 0, (-1, [])
        loader = self._loader
        generator = torch.Generator()
        generator.manual_seed(seed_of_sample(self._seed, self._epoch, 0))
        more: dict[str, Any] = {}
        if loader.num_workers:
            more = {
                "worker_init_fn": loader.worker_init_fn,
                "prefetch_factor": loader.prefetch_factor,
                "multiprocessing_context": loader.multiprocessing_context,
            }
        self._items = iter(
            DataLoader(
                loader.dataset,
                batch_size=None,
                num_workers=loader.num_workers,
                collate_fn=_identity,
                generator=generator,
                **more,
            )
        )
