"""Out-of-memory recovery: the worker restarts and computes its micro-batches in smaller parts.

A script cannot return into the middle of a loop that ran out of memory, and its allocations stay
fragmented. A new process has all memory again. The number of parts is stored beside the run's checkpoints.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from barnraise.runs.sharding import MicroBatch
from barnraise.training.recovery.failures import kill_self

log = logging.getLogger("barnraise.training")

MAX_PARTS = 1 << 16


class MicroBatchPart(NamedTuple):
    """The samples of one forward and backward pass: a micro-batch or a part of it."""

    unit: MicroBatch
    part: int
    span: MicroBatch
    is_last: bool


class OutOfMemoryGuard:
    """Splits micro-batches; ``parts``: in how many parts this worker computes one."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.parts = _read_parts(file)

    @classmethod
    def from_environment(cls) -> OutOfMemoryGuard:
        """Build the guard of this worker, whose file is beside the run's checkpoints."""
        folder = os.environ.get("BARNRAISE_CHECKPOINTS", "")
        local_rank = os.environ.get("LOCAL_RANK", "0")
        return cls(Path(folder).parent / f"parts-{local_rank}" if folder else None)

    def split(self, unit: MicroBatch) -> list[MicroBatchPart]:
        """Split a micro-batch as evenly as possible; no part is empty."""
        count = min(self.parts, unit.size)
        edges = [unit.first + unit.size * part // count for part in range(count + 1)]
        spans = (MicroBatch(unit.number, *edge) for edge in pairwise(edges))
        return [MicroBatchPart(unit, part, span, part == count - 1) for part, span in enumerate(spans)]

    def install(self, unit: int) -> None:
        """Install an excepthook that restarts the worker with smaller parts after an OOM."""
        if self._file is not None:
            sys.excepthook = self._make_hook(unit, sys.excepthook)

    def halve(self, unit: int) -> bool:
        """Store twice the number of parts for the next start. Return False if parts cannot be smaller."""
        if self._file is None or self.parts >= min(unit, MAX_PARTS):
            return False
        self.parts *= 2
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(str(self.parts), encoding="ascii")
        return True

    def _make_hook(
        self,
        unit: int,
        previous: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    ) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not is_out_of_memory(error) or not self.halve(unit):
                previous(kind, error, trace)
                return
            log.warning(
                "out of memory with %d samples at a time; this worker restarts with at most %d",
                -(-unit * 2 // self.parts),
                -(-unit // self.parts),
            )
            kill_self()

        return hook


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that a device or the machine has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    # The second is torch's message for main memory.
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def _read_parts(file: Path | None) -> int:
    try:
        parts = int(file.read_text(encoding="ascii")[:8]) if file is not None else 1
    except (OSError, ValueError):
        return 1
    return min(max(parts, 1), MAX_PARTS)
