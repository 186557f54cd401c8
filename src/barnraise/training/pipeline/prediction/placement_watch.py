"""Watch of the main worker over the placement: with measured speeds, another one may have become faster."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from barnraise.planning.split.move_cost import HeldBlocks, with_moves
from barnraise.planning.split.replacement import ReplacementState, decide_replacement
from barnraise.planning.split.replica_placement import SplitPlacement, place_pipelines, predict_pipelines
from barnraise.planning.split.split_problem import SplitProblem
from barnraise.training.pipeline.prediction.plausible import possible_seconds

log = logging.getLogger("barnraise.training")

_STEPS = 5  # between two checks
_SHARE = 0.02  # of the time that checks may take


class PlacementWatch:
    """Compares the placement of a group now and then with the best one. ``is_due``: blocks shall be moved."""

    def __init__(self) -> None:
        self.is_due = False
        self._state = ReplacementState()
        self._problem: SplitProblem | None = None
        self._placement = SplitPlacement(())
        self._steps = 0
        self._next = 0.0

    def start(self, problem: SplitProblem, placement: SplitPlacement) -> None:
        """Watch a new placement; its machines and links are those of the problem."""
        runs = map(placement.run_of, range(len(problem.machines)))
        held = [HeldBlocks(range(*run)) if run is not None else HeldBlocks() for run in runs]
        self._problem, self._placement = with_moves(problem, held), placement
        self._state = self._state._replace(favourable=0)
        self.is_due, self._steps = False, 0

    def note_step(self, block_s: Sequence[float]) -> None:
        """Check after a few steps; ``block_s``: the measured seconds of a block by rank, 0 if unknown."""
        self._steps += 1
        start = time.monotonic()
        if self._problem is None or self.is_due or self._steps % _STEPS or start < self._next:
            return
        problem = self._problem.measured(list(map(possible_seconds, block_s)))
        if len(problem.machines) < 2 or not problem.speeds:
            return
        current, best = self._predict(problem, self._placement), self._predict(problem, None)
        decision = decide_replacement(self._state, current, best)
        self._state, self.is_due = decision.state, decision.is_due
        log.log(logging.WARNING if decision.is_due else logging.INFO, "placement: %s", decision.why)
        end = time.monotonic()
        self._next = end + (end - start) / _SHARE

    def _predict(self, problem: SplitProblem, placement: SplitPlacement | None) -> float:
        """Return the predicted step of a placement, or of the best one."""
        chosen = placement or place_pipelines(problem)  # it fits, as it did when the group began
        return predict_pipelines(problem, chosen).step_s
