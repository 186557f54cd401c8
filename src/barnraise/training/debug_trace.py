"""Debug trace: one line per commit, in the file that BARNRAISE_TRACE_COMMITS names.

Tests and benchmarks read it to prove that all workers hold the same state. If their processors round
differently, it proves that all apply the same result. Without the variable it does nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from barnraise.checkpoint.serialization import digest
from barnraise.training.group.interface import GroupManager
from barnraise.training.recovery.state_transfer import sketch
from barnraise.training.state.training_state import TrainingState

_MAX_HASHED = 10_000_000  # numbers; of a larger state only a sketch is hashed


class CommitTrace:
    """Writer of the trace: group, state digest and micro-batches of every commit."""

    def __init__(self) -> None:
        self._path = os.environ.get("BARNRAISE_TRACE_COMMITS", "")
        self._group = ""
        self._count = 0
        self._result = b""

    def note_group(self, manager: GroupManager, count: int, mixed_result: bytes) -> None:
        """Remember the group that computed the result, which may be applied in a later one.

        ``mixed_result``: the hash of the result, if the states of this group may differ in their last bits.
        """
        self._group = f"{manager.generation} {manager.rank} {manager.world}"
        self._count, self._result = count, mixed_result

    def write(self, state: TrainingState, done: int, completed: Iterable[int]) -> None:
        """Append a line for the step that was just committed."""
        if not self._path:
            return
        held = (self._result or _hash(state, done)).hex()
        fields = f"{time.time():.6f} {done} {self._group} {held} {os.getpid()} {self._count}"
        with open(self._path, "a", encoding="ascii") as file:
            file.write(f"{fields} {sorted(completed)}\n")


def _hash(state: TrainingState, done: int) -> bytes:
    parts = state.flatten(done)
    is_large = sum(tensor.numel() for tensor in parts.tensors) > _MAX_HASHED
    return sketch(parts, done) if is_large else digest(parts)
