"""An iterable data set: every member reads all of it and computes its own units of it.

If it yields the same items in the same order on every machine, samples count exactly once as with any other
data set. Whether it does, nobody can check; only how many there are in a step is compared at every commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from barnraise.runs.sharding import MicroBatch, cut_micro_batches
from barnraise.training.data.loader import batch_size_of, own_randomness, seed_all, seed_of_sample, seed_unit
from barnraise.training.state.training_state import TrainingState

log = logging.getLogger("barnraise.training")

_SAY_S = 10.0


def _as_it_is(item: Any) -> Any:
    return item


class IterableLoader:
    """``state`` says which epoch is at hand, and with which step it began."""

    def __init__(self, loader: DataLoader[Any], unit: int, seed: int, state: TrainingState) -> None:
        self._loader = loader
        self._batch = batch_size_of(loader)
        self._unit = min(unit, self._batch)
        self._seed = seed
        self._state = state
        self._epoch = -1
        self._items: Iterator[Any] = iter(())
        self._at = 0  # items that were read of the epoch
        self._held: tuple[int, list[Any]] = (-1, [])  # where the items of the step at hand begin

    def __len__(self) -> int:
        raise TypeError("a stream has no length; count steps with run.done")

    @property
    def batch(self) -> int:
        return self._batch

    def units(self, step: int, period: int = 1) -> tuple[MicroBatch, ...]:
        """None where the epoch is over."""
        first, items = self._read(step, period)
        return cut_micro_batches(first, first + len(items), self._unit)

    def steps(self, step: int, period: int) -> int:
        return -(-len(self._read(step, period)[1]) // self._batch)

    def may_go_ahead(self, step: int) -> bool:
        """It has read no further than what is at hand."""
        return False

    def is_over(self, epoch: int, done: int) -> bool:
        if epoch != self._state.epoch:
            return epoch < self._state.epoch
        return not self._read(done)[1]

    def batches(self, step: int, spans: Sequence[MicroBatch]) -> Iterator[Any]:
        first, items = self._read(step)
        for span in spans:
            with own_randomness():
                batch = self._loader.collate_fn(items[span.first - first : span.last - first])
            yield batch

    def catch_up(self, step: int) -> None:
        """Read what lies before a step, and the step: a newcomer does it before anybody waits for it."""
        self._read(step)

    def seed_unit(self, step: int, unit: MicroBatch, part: int = 0) -> None:
        seed_unit(self._seed, step, unit, part)

    def _read(self, step: int, period: int = 1) -> tuple[int, list[Any]]:
        """The items of a step or more, and where in the epoch they begin."""
        first = (step - self._state.epoch_began) * self._batch
        if self._epoch != self._state.epoch or first < min(self._at, self._held[0]):
            self._open()
        if self._held[0] != first:
            self._skip_to(first)
            self._held = (first, [])
        found = self._held[1]
        while len(found) < period * self._batch:
            with own_randomness():
                more = [item for _ in range(self._batch) for item in self._next()]
            if self._loader.drop_last and len(more) < self._batch:
                more = []
            if not more:
                break
            found += more
        return first, found

    def _skip_to(self, first: int) -> None:
        """A newcomer has to read what the others had."""
        began = said = time.monotonic()
        with own_randomness():
            for at in range(self._at, first):
                self._next()
                now = time.monotonic()
                if now - said > _SAY_S:
                    said = now
                    words = "reading the stream for %.0f s, to where the training is: %d of %d items"
                    log.warning(words, now - began, at, first)

    def _next(self) -> list[Any]:
        seed_all(seed_of_sample(self._seed, self._epoch, self._at))
        self._at += 1
        for item in self._items:
            return [item]
        return []

    def _open(self) -> None:
        self._epoch, self._at, self._held = self._state.epoch, 0, (-1, [])
        loader = self._loader
        start = torch.Generator()
        start.manual_seed(seed_of_sample(self._seed, self._epoch, 0))
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
                collate_fn=_as_it_is,
                generator=start,
                **more,
            )
        )
