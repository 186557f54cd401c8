"""Forecast of a split training: the speeds of its group, and the predicted step of each placement."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from barnraise.history.entries import PHASES
from barnraise.planning.split.move_cost import HeldBlocks, with_moves
from barnraise.planning.split.replica_placement import SplitPlacement, predict_pipelines
from barnraise.planning.split.split_problem import SplitMachine, SplitProblem
from barnraise.planning.split.stage_placement import ModelParts
from barnraise.planning.split.stage_time import BlockSpeed, SplitStepTime, StageOrder
from barnraise.training.group.interface import GroupManager
from barnraise.training.pipeline.prediction.block_probe import ProbedModel, probe_blocks
from barnraise.training.pipeline.prediction.group_speeds import (
    GroupSpeeds,
    LinkMeter,
    MemberSpeed,
    host_of,
)
from barnraise.training.pipeline.prediction.kept_activations import KeptBytes, with_kept
from barnraise.training.pipeline.prediction.plausible import most_kept
from barnraise.training.record.split_record import PlannedStep

log = logging.getLogger("barnraise.training")

_RECENT = 5  # steps whose median is the speed of a machine


class SplitPlan(NamedTuple):
    """Placement that takes effect after ``done`` steps, and the step that it is predicted to take."""

    done: int
    names: tuple[str, ...]
    batches: int
    order: StageOrder
    step: SplitStepTime

    @property
    def planned(self) -> PlannedStep:
        """Return the prediction as the record of the run has it."""
        step = self.step
        compute_s = sum(step.busy_s) / len(step.busy_s)
        waiting_s = max(0.0, step.step_s - step.commit_s - compute_s)
        phases = {"compute": compute_s, "communication": step.commit_s, "activations": waiting_s}
        return PlannedStep(step.step_s, tuple(phases.get(name, 0.0) for name in PHASES))


class SplitForecast:
    """Speeds of this worker and of its group. ``plan``: of the newest placement, if speeds are known.

    ``sent_bytes``: what travels of a micro-batch from a stage to the next one. ``parts``: of the model, with
    the most that a micro-batch keeps on any machine of the group.
    """

    def __init__(
        self,
        manager: GroupManager,
        parts: ModelParts,
        order: StageOrder,
        sent_bytes: int,
    ) -> None:
        self.block = BlockSpeed()
        self.plan: SplitPlan | None = None
        self._manager, self.order, self.sent_bytes = manager, order, sent_bytes
        self._own_parts = self.parts = parts
        self._meter = LinkMeter(manager, sent_bytes)
        self._host = (0, 0.0)
        self._recent: deque[float] = deque(maxlen=_RECENT)  # seconds of a block
        self.group: GroupSpeeds | None = None

    def probe(self, probed: ProbedModel, memory_bytes: int, device: torch.device) -> None:
        """Measure the speed of this machine. ``memory_bytes``: what a block may take."""
        self.block = probe_blocks(probed, memory_bytes)
        self._host = host_of(device)

    def note_step(self, busy_s: float, batches: int, run: tuple[int, int]) -> None:
        """Take the speed of this machine from its newest steps; ``busy_s``: what its stage computed."""
        measured = self.block.corrected(busy_s / batches, *run, len(self.parts.blocks))
        self._recent.append(measured.block_s)
        ratio = statistics.median(self._recent) / measured.block_s if measured.block_s else 1.0
        self.block = measured._replace(
            forward_s=ratio * measured.forward_s, backward_s=ratio * measured.backward_s
        )

    def exchange(self) -> None:
        """Exchange the speeds of machines and links with the group."""
        bytes_, rate = self._host
        parts = self._own_parts
        own = MemberSpeed(
            *self.block,
            host_bytes=bytes_,
            host_rate=rate,
            block_kept_bytes=max(block.activation_bytes for block in parts.blocks),
            after_kept_bytes=parts.after.activation_bytes,
        )
        self.group = self._meter.exchange(own)
        members = self.group.members
        kept = [KeptBytes(member.block_kept_bytes, member.after_kept_bytes) for member in members]
        largest, too_large = most_kept(kept)
        for name in map(self._manager.name_of, too_large):
            log.warning("%s reports much larger activations than the others; four times theirs count", name)
        self.parts = with_kept(parts, largest)

    def problem(
        self, memory_bytes: Sequence[int], batches: int, held: Sequence[HeldBlocks] = ()
    ) -> SplitProblem:
        """Return what has to be placed on the members of the group; ``memory_bytes``, ``held``: by rank."""
        assert self.group is not None
        machines = tuple(
            SplitMachine(self._manager.name_of(rank), memory, member.block)
            for rank, (memory, member) in enumerate(zip(memory_bytes, self.group.members, strict=True))
        )
        links = self.group.links
        problem = SplitProblem(self.parts, machines, links, batches, self.sent_bytes, self.order)
        return with_moves(problem, held) if held else problem

    def predict(self, problem: SplitProblem, placement: SplitPlacement, done: int) -> None:
        """Predict the steps of a placement, if the speed of a machine is known."""
        self.plan = None
        if not problem.speeds:
            return
        ranks = [rank for pipeline in placement.pipelines for rank in pipeline.order]
        names = tuple(problem.machines[rank].name for rank in ranks)
        step = predict_pipelines(problem, placement)
        self.plan = SplitPlan(done, names, problem.batches, problem.order, step)
        if self._manager.rank == 0:
            log.warning("predicted: %s", step.sentence)
