"""Prefetching with persistent DataLoader workers: each step tells them what to read next.

torch's own loader reads a whole epoch in an order that is known when it starts. Here a step says what it
needs when its micro-batches are assigned. It may be abandoned; what was prefetched for it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

Row = list[tuple[int, int]]  # samples and their seeds


class _Rows:
    """Batch sampler that yields the rows wanted now."""

    def __init__(self) -> None:
        self.wanted: Sequence[Row] = ()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.wanted)

    def __len__(self) -> int:
        return len(self.wanted)


class PersistentLoader:
    """DataLoader whose worker processes are started once for the run, or once for each epoch.

    Without ``persistent_workers`` they restart with each epoch, and so see changes that the script makes to
    the dataset, as with torch.
    """

    def __init__(self, loader: DataLoader[Any], dataset: Dataset[Any]) -> None:
        self._like = loader
        self._dataset = dataset
        self._rows = _Rows()
        self._epoch = -1
        self._loader: DataLoader[Any] | None = None

    def batches(self, epoch: int, rows: Sequence[Row]) -> Iterator[Any]:
        """Yield one batch for each row, in order. Another call ends the previous one."""
        if self._loader is None or (self._epoch != epoch and not self._like.persistent_workers):
            self._loader = None  # its processes stop before others start
            self._loader, self._epoch = self._make(epoch), epoch
        self._rows.wanted = rows
        yield from self._loader

    def _make(self, epoch: int) -> DataLoader[Any]:
        like = self._like
        # Seeds come with the samples; this generator keeps torch from using the script's random state.
        generator = torch.Generator()
        generator.manual_seed(epoch)
        return DataLoader(
            self._dataset,
            batch_sampler=self._rows,
            num_workers=like.num_workers,
            collate_fn=like.collate_fn,
            pin_memory=like.pin_memory,
            timeout=like.timeout,
            worker_init_fn=like.worker_init_fn,
            multiprocessing_context=like.multiprocessing_context,
            generator=generator,
            prefetch_factor=like.prefetch_factor,
            persistent_workers=True,
        )
