"""Loader processes that stay: what they read next is told to them, step by step.

A loader of torch's own reads a whole epoch in an order that is known when it begins. Here each step says what
it needs when its units are dealt, and may be given up in the middle; what was read for nobody is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

Row = list[tuple[int, int]]  # samples and their seeds


class _Rows:
    """A batch sampler of what is wanted now."""

    def __init__(self) -> None:
        self.wanted: Sequence[Row] = ()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.wanted)

    def __len__(self) -> int:
        return len(self.wanted)


class PersistentLoader:
    """By the processes of the user's ``loader``, started once: for the run, or anew for each epoch.

    Those of a loader without ``persistent_workers`` see what the script changes in its data set between
    epochs, as with torch.
    """

    def __init__(self, loader: DataLoader[Any], dataset: Dataset[Any]) -> None:
        self._like = loader
        self._dataset = dataset
        self._rows = _Rows()
        self._epoch = -1
        self._loader: DataLoader[Any] | None = None

    def batches(self, epoch: int, rows: Sequence[Row]) -> Iterator[Any]:
        """One for each row, in order. To ask again ends what was asked before."""
        if self._loader is None or (self._epoch != epoch and not self._like.persistent_workers):
            self._loader = None  # its processes end before others begin
            self._loader, self._epoch = self._made(epoch), epoch
        self._rows.wanted = rows
        yield from self._loader

    def _made(self, epoch: int) -> DataLoader[Any]:
        like = self._like
        # Seeds come with the samples; this one keeps torch from drawing from the script's own randomness.
        start = torch.Generator()
        start.manual_seed(epoch)
        return DataLoader(
            self._dataset,
            batch_sampler=self._rows,
            num_workers=like.num_workers,
            collate_fn=like.collate_fn,
            pin_memory=like.pin_memory,
            timeout=like.timeout,
            worker_init_fn=like.worker_init_fn,
            multiprocessing_context=like.multiprocessing_context,
            generator=start,
            prefetch_factor=like.prefetch_factor,
            persistent_workers=True,
        )
