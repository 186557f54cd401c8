"""Forecast of a split training: the speeds of its group, and the predicted step of each placement."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from barnraise.history.entries import PHASES
from barnraise.planning.plan.stage_placement import ModelParts
from barnraise.planning.plan.stage_time import (
    BlockSpeed,
    SplitStepTime,
    StageOrder,
    commit_seconds,
    fill_unknown,
    predict_split_step,
    stage_times,
)
from barnraise.training.group.interface import GroupManager
from barnraise.training.pipeline.prediction.block_probe import ProbedModel, probe_blocks
from barnraise.training.pipeline.prediction.group_speeds import (
    GroupSpeeds,
    LinkMeter,
    MemberSpeed,
    host_of,
)
from barnraise.training.record.split_record import PlannedStep

log = logging.getLogger("barnraise.training")


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

    ``sent_bytes``: what travels of a micro-batch from a stage to the next one.
    """

    def __init__(self, manager: GroupManager, parts: ModelParts, order: StageOrder, sent_bytes: int) -> None:
        self.block = BlockSpeed()
        self.plan: SplitPlan | None = None
        self._manager, self._parts, self.order, self.sent_bytes = manager, parts, order, sent_bytes
        self._meter = LinkMeter(manager, sent_bytes)
        self._host = (0, 0.0)
        self.group: GroupSpeeds | None = None

    def probe(self, probed: ProbedModel, memory_bytes: int, device: torch.device) -> None:
        """Measure the speed of this machine. ``memory_bytes``: what a block may take."""
        self.block = probe_blocks(probed, memory_bytes)
        self._host = host_of(device)

    def note_step(self, busy_s: float, batches: int, run: tuple[int, int]) -> None:
        """Take the speed of this machine from a step; ``busy_s``: what its stage computed."""
        self.block = self.block.corrected(busy_s / batches, *run, len(self._parts.blocks))

    def exchange(self) -> None:
        """Exchange the speeds of machines and links with the group."""
        bytes_, rate = self._host
        self.group = self._meter.exchange(MemberSpeed(*self.block, host_bytes=bytes_, host_rate=rate))

    def link_s(self, rank: int) -> float:
        """Return the seconds in which activations reach the next rank, or their gradient comes back."""
        assert self.group is not None
        links, count = self.group.links, self.sent_bytes
        if rank + 1 == len(self.group.members):
            return 0.0
        ends = ((rank, rank + 1), (rank + 1, rank))
        return max(links.transfer_s(a, b, count) + links.latencies[a][b] for a, b in ends)

    def predict(self, runs: Sequence[tuple[int, int]], batches: int, done: int) -> None:
        """Predict the steps of a placement; ``runs``: the blocks of each rank."""
        manager, group = self._manager, self.group
        assert group is not None
        speeds = fill_unknown([member.block for member in group.members])
        if not speeds:
            self.plan = None
            return
        ranks = range(len(runs))
        names = tuple(manager.name_of(rank) for rank in ranks)
        stages = stage_times(runs, ranks, names, speeds, group.links, self.sent_bytes)
        commit_s = commit_seconds(self._parts, runs, ranks, group.links)
        step = predict_split_step(stages, batches, self.order, commit_s)
        self.plan = SplitPlan(done, names, batches, self.order, step)
        if manager.rank == 0:
            log.warning("predicted: %s", step.sentence)
