"""Too little memory for a whole unit: this worker ends, starts again, and computes its units in more parts.

A script cannot be taken back into the middle of a loop that ran out of memory, and what it had allocated
stays torn; a new process begins with all of it. The number of parts is kept beside the run's checkpoints.
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
from barnraise.training.recovery.failures import end_as_killed

log = logging.getLogger("barnraise.training")

MOST_PARTS = 1 << 16


class MicroBatchPart(NamedTuple):
    """What is computed at once: a unit, or a part of it."""

    unit: MicroBatch
    part: int
    span: MicroBatch
    is_last: bool


class OutOfMemoryGuard:
    """``parts``: in how many pieces this worker computes a unit."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.parts = _read(file)

    @classmethod
    def from_environment(cls) -> OutOfMemoryGuard:
        folder = os.environ.get("BARNRAISE_CHECKPOINTS", "")
        place = os.environ.get("LOCAL_RANK", "0")
        return cls(Path(folder).parent / f"parts-{place}" if folder else None)

    def pieces(self, unit: MicroBatch) -> list[MicroBatchPart]:
        """As even as possible; none is empty."""
        count = min(self.parts, unit.size)
        edges = [unit.first + unit.size * part // count for part in range(count + 1)]
        spans = (MicroBatch(unit.number, *edge) for edge in pairwise(edges))
        return [MicroBatchPart(unit, part, span, part == count - 1) for part, span in enumerate(spans)]

    def watch(self, unit: int) -> None:
        """From now on an end for want of memory is followed by a start with smaller pieces."""
        if self._file is not None:
            sys.excepthook = self._hook(unit, sys.excepthook)

    def halve(self, unit: int) -> bool:
        """Whether there is something smaller to try; it is on the disk then."""
        if self._file is None or self.parts >= min(unit, MOST_PARTS):
            return False
        self.parts *= 2
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(str(self.parts), encoding="ascii")
        return True

    def _hook(
        self, unit: int, before: Callable[[type[BaseException], BaseException, TracebackType | None], object]
    ) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not is_out_of_memory(error) or not self.halve(unit):
                before(kind, error, trace)
                return
            log.warning(
                "out of memory with %d samples at a time: this worker starts again with at most %d",
                -(-unit * 2 // self.parts),
                -(-unit // self.parts),
            )
            end_as_killed()

        return hook


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    words = str(error).lower()
    # The second is what torch says of a processor's own memory.
    return isinstance(error, RuntimeError) and ("out of memory" in words or "can't allocate memory" in words)


def _read(file: Path | None) -> int:
    try:
        found = int(file.read_text(encoding="ascii")[:8]) if file is not None else 1
    except (OSError, ValueError):
        return 1
    return min(max(found, 1), MOST_PARTS)
