"""For tests: what every member holds after every commit, and which units it had computed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from barnraise.checkpoint.serialization import digest
from barnraise.training.group.manager import GroupManager
from barnraise.training.recovery.state_transfer import sketch
from barnraise.training.state.training_state import TrainingState

_HASHED_WHOLE = 10_000_000  # numbers; of a larger state, a trace has a sketch


class CommitTrace:
    """One line for each commit, in the file that BARNRAISE_TRACE_COMMITS names."""

    def __init__(self) -> None:
        self._path = os.environ.get("BARNRAISE_TRACE_COMMITS", "")
        self._where = ""

    def hold(self, circle: GroupManager, units: int) -> None:
        """In which group a result came about: that may be another one than where it is applied."""
        self._where = f"{circle.generation} {circle.rank} {circle.world}"
        self._of = units

    def note(self, state: TrainingState, done: int, units: Iterable[int]) -> None:
        if not self._path:
            return
        parts = state.parts(done)
        is_large = sum(tensor.numel() for tensor in parts.tensors) > _HASHED_WHOLE
        held = (sketch(parts, done) if is_large else digest(parts)).hex()
        line = f"{time.time():.6f} {done} {self._where} {held} {os.getpid()} {self._of} {sorted(units)}\n"
        with open(self._path, "a", encoding="ascii") as file:
            file.write(line)
