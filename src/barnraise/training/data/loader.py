"""A user's loader, read for its data set and its habits, served unit by unit."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from barnraise.core.errors import RunError
from barnraise.runs.sharding import DataOrder, MicroBatch, micro_batch_seed
from barnraise.training.data.prefetch import PersistentLoader

_SAMPLE = 1  # the purpose of a seed: of a sample's own randomness, or of a unit's
_UNIT = 2


class _Placed(Dataset[Any]):
    """The user's data set by (sample, seed): its randomness belongs to the sample's place in the order."""

    def __init__(self, inner: Dataset[Any]) -> None:
        self._inner = inner

    def __getitem__(self, place: tuple[int, int]) -> Any:
        index, seed = place
        seed_all(seed)
        return self._inner[index]


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """Whatever is seeded inside, the script's own randomness goes on as if nothing had been."""
    state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        numpy.random.set_state(state[2])


def seed_all(seed: int) -> None:
    # torch.manual_seed keeps a stack trace for each kind of device that was not used yet, which takes 2 ms.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


def seed_unit(seed: int, step: int, unit: MicroBatch, part: int) -> None:
    """What happens inside the unit (dropout) depends on its place, not on who computes it.

    In parts of a unit it is something else than in the whole.
    """
    seed_all(micro_batch_seed(seed, step, unit.number, _UNIT + (part << 8)))


def seed_of_sample(seed: int, epoch: int, at: int) -> int:
    return micro_batch_seed(seed, epoch, at, _SAMPLE)


def batch_size_of(loader: DataLoader[Any]) -> int:
    if loader.batch_size is None:
        raise RunError(
            "the loader has no batch_size, which a session reads the global batch from",
            hint="Give the loader a batch_size instead of a batch_sampler; see docs/session.md.",
        )
    return loader.batch_size


class MicroBatchLoader:
    """Batches of units, as the user's own loader would have collated them."""

    def __init__(self, loader: DataLoader[Any], unit: int, seed: int) -> None:
        batch_size = batch_size_of(loader)
        sampler = loader.sampler
        if not isinstance(sampler, RandomSampler | SequentialSampler) or getattr(
            sampler, "replacement", False
        ):
            raise RunError(
                f"the loader's sampler is a {type(sampler).__name__}: its order cannot be had elsewhere",
                hint="Use shuffle=True or shuffle=False; weight samples in the loss instead.",
            )
        self.loader = loader
        samples = len(loader.dataset)  # type: ignore[arg-type]
        batch = min(batch_size, samples)
        self.course = DataOrder(
            samples, batch, min(unit, batch), seed, isinstance(sampler, RandomSampler), loader.drop_last
        )
        self._placed = _Placed(loader.dataset)
        self._feeding = PersistentLoader(loader, self._placed)
        self._order: tuple[int, Any] = (-1, None)
        if not len(self):
            raise RunError("the data set is smaller than one batch", hint="Use a smaller batch_size.")

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self.course.steps_per_epoch

    @property
    def batch(self) -> int:
        return self.course.batch

    def units(self, step: int, period: int = 1) -> tuple[MicroBatch, ...]:
        return self.course.micro_batches(step, period)

    def steps(self, step: int, period: int) -> int:
        return self.course.steps_in_round(step, period)

    def may_go_ahead(self, step: int) -> bool:
        return self.course.may_overlap(step)

    def is_over(self, epoch: int, done: int) -> bool:
        return done >= (epoch + 1) * len(self)

    def batches(self, step: int, units: Sequence[MicroBatch]) -> Iterator[Any]:
        """The batches of these units, in order."""
        if not units:
            return
        epoch, _ = self.course.locate_step(step)
        if self._order[0] != epoch:
            self._order = (epoch, self.course.sample_order(epoch))
        order = self._order[1]
        places = [
            [(int(order[at]), self._seed(epoch, at)) for at in range(one.first, one.last)] for one in units
        ]
        if self.loader.num_workers == 0:
            collate: Callable[[list[Any]], Any] = self.loader.collate_fn
            for row in places:
                with own_randomness():
                    batch = collate([self._placed[place] for place in row])
                yield batch
            return
        yield from self._feeding.batches(epoch, places)

    def catch_up(self, step: int) -> None:
        """Any place can be read at once."""

    def seed_unit(self, step: int, unit: MicroBatch, part: int = 0) -> None:
        seed_unit(self.course.seed, step, unit, part)

    def _seed(self, epoch: int, at: int) -> int:
        return seed_of_sample(self.course.seed, epoch, at)
