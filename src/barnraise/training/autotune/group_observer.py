"""Observer of commits: gives the tuner a sample after each one."""

from __future__ import annotations

import time

from barnraise.training.autotune.tuner import GroupSample, SyncTuner
from barnraise.training.group.interface import GroupManager
from barnraise.training.state.training_state import TrainingState
from barnraise.training.steps.throughput import Throughput


class GroupObserver:
    """Callback after each commit; only the tuner of rank 0 gets samples."""

    def __init__(
        self, tuner: SyncTuner, manager: GroupManager, throughput: Throughput, state: TrainingState
    ) -> None:
        self._tuner, self._manager = tuner, manager
        self._throughput, self._state = throughput, state
        self._last = (time.monotonic(), 0.0)  # time and step of the last commit

    def __call__(self) -> None:
        now, covered, manager = time.monotonic(), self._state.covered, self._manager
        step_s = (now - self._last[0]) / max(1.0, covered - self._last[1])
        self._last = (now, covered)
        if manager.rank == 0:
            speeds = tuple(self._throughput.speeds) if self._throughput.is_known else ()
            sample = GroupSample(manager.generation, self._state.sync, speeds, manager.machines(), step_s)
            self._tuner.observe(sample)
