"""Wrapper of the script's DataLoader (its dataset and options) that serves one micro-batch at a time."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler

from barnraise.core.errors import RunError
from barnraise.runs.sharding import DataOrder, MicroBatch, micro_batch_seed
from barnraise.training.data.prefetch import PersistentLoader

# Purposes of a seed.
_SAMPLE = 1
_MICROBATCH = 2


class _PositionedDataset(Dataset[Any]):
    """Dataset indexed by (sample, seed), so that random transforms depend on the position in the order."""

    def __init__(self, inner: Dataset[Any]) -> None:
        self._inner = inner

    def __getitem__(self, place: tuple[int, int]) -> Any:
        index, seed = place
        seed_all(seed)
        return self._inner[index]


class EpochOrder(Sampler[int]):
    """Sampler whose order is a pure function of the epoch, so that all workers know it at any time."""

    def __init__(self, samples: int, order: Callable[[int], Sequence[int]]) -> None:
        """Set ``samples``: positions of an epoch; and ``order``: returns the samples of an epoch."""
        self._samples, self.of_epoch = samples, order

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[int]:
        return iter(self.of_epoch(0))


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the script's random state after the context."""
    state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        numpy.random.set_state(state[2])


def seed_all(seed: int) -> None:
    # torch.manual_seed keeps a stack trace for each kind of device that was not used yet, which takes 2 ms.
    """Seed torch, random and numpy, on all devices."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


def seed_microbatch(seed: int, step: int, unit: MicroBatch, part: int) -> None:
    """Seed by the micro-batch's position, so that dropout does not depend on the worker.

    Splitting a micro-batch into parts changes its random numbers.
    """
    seed_all(micro_batch_seed(seed, step, unit.number, _MICROBATCH + (part << 8)))


def seed_of_sample(seed: int, epoch: int, at: int) -> int:
    """Return the seed of a sample's own random transforms."""
    return micro_batch_seed(seed, epoch, at, _SAMPLE)


def batch_size_of(loader: DataLoader[Any]) -> int:
    """Return the global batch size. Raise RunError if the loader has none."""
    if loader.batch_size is None:
        raise RunError(
            "the loader has no batch_size, which the session uses as the global batch size",
            hint="Give the loader a batch_size instead of a batch_sampler; see docs/session.md.",
        )
    return loader.batch_size


class MicroBatchLoader:
    """Micro-batches of a map-style dataset, collated as the script's loader does."""

    def __init__(self, loader: DataLoader[Any], unit: int, seed: int) -> None:
        batch_size = batch_size_of(loader)
        sampler = loader.sampler
        self._own_order = sampler if isinstance(sampler, EpochOrder) else None
        if not isinstance(sampler, RandomSampler | SequentialSampler | EpochOrder) or getattr(
            sampler, "replacement", False
        ):
            raise RunError(
                f"the loader's sampler is a {type(sampler).__name__}: its order is unknown elsewhere",
                hint="Use shuffle=True or shuffle=False; weigh samples in the loss instead.",
            )
        self.loader = loader
        samples = len(loader.dataset) if self._own_order is None else len(self._own_order)  # type: ignore[arg-type]
        batch = min(batch_size, samples)
        self.data_order = DataOrder(
            samples, batch, min(unit, batch), seed, isinstance(sampler, RandomSampler), loader.drop_last
        )
        self._dataset = _PositionedDataset(loader.dataset)
        self._prefetcher = PersistentLoader(loader, self._dataset)
        self._order: tuple[int, Any] = (-1, None)
        if not len(self):
            raise RunError("the dataset is smaller than one batch", hint="Use a smaller batch_size.")

    def __len__(self) -> int:
        """Return the steps of an epoch."""
        return self.data_order.steps_per_epoch

    @property
    def batch(self) -> int:
        return self.data_order.batch

    def microbatches(self, step: int, period: int = 1) -> tuple[MicroBatch, ...]:
        return self.data_order.micro_batches(step, period)

    def steps(self, step: int, period: int) -> int:
        return self.data_order.steps_in_round(step, period)

    def may_overlap(self, step: int) -> bool:
        return self.data_order.may_overlap(step)

    def is_over(self, epoch: int, done: int) -> bool:
        return done >= (epoch + 1) * len(self)

    def batches(self, step: int, units: Sequence[MicroBatch]) -> Iterator[Any]:
        """Yield the batches of these micro-batches, in order."""
        if not units:
            return
        epoch, _ = self.data_order.locate_step(step)
        if self._order[0] != epoch:
            chosen = self.data_order.sample_order if self._own_order is None else self._own_order.of_epoch
            self._order = (epoch, chosen(epoch))
        order = self._order[1]
        places = [
            [(int(order[at]), self._seed(epoch, at)) for at in range(unit.first, unit.last)] for unit in units
        ]
        if self.loader.num_workers == 0:
            collate: Callable[[list[Any]], Any] = self.loader.collate_fn
            for row in places:
                with preserved_rng():
                    batch = collate([self._dataset[place] for place in row])
                yield batch
            return
        yield from self._prefetcher.batches(epoch, places)

    def catch_up(self, step: int) -> None:
        """Return at once: any position can be read directly."""

    def seed_microbatch(self, step: int, unit: MicroBatch, part: int = 0) -> None:
        seed_microbatch(self.data_order.seed, step, unit, part)

    def _seed(self, epoch: int, at: int) -> int:
        return seed_of_sample(self.data_order.seed, epoch, at)
