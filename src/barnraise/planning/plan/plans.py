"""Plans with their predictions, and the ranking that the planner returns. Frozen; encodes to JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from barnraise.planning.cost.quality_model import OuterRule, Quality
from barnraise.planning.cost.step_cost import Kind
from barnraise.planning.cost.traffic_model import Way
from barnraise.planning.inputs.cluster import PlanCluster
from barnraise.planning.inputs.levels import Shape
from barnraise.planning.plan.calibration import Observation, Traffic, exposed_transfer

_MAX_NAMED = 4


class StepPhases(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step by phase; together they are the step.

    ``compute_s``: without any waiting. ``waiting_s``: for the slowest machine. ``communication_s``: the
    visible part, with encoding. For local SGD: those of a round, divided by its steps.
    """

    compute_s: float
    communication_s: float
    waiting_s: float
    overhead_s: float


class WireTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Communication of a step by the link arithmetic, and the calibration factor."""

    transfer_s: float
    factor: float
    hideable_s: float
    last_share: float
    codec_s: float


class PlanPart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of one machine in a step. ``inner_steps``: of its worker, in a round of local SGD."""

    name: str
    samples: float
    compute_s: float
    sends_bytes: float
    receives_bytes: float
    memory_bytes: float
    inner_steps: int | None = None


class SlowestLink(msgspec.Struct, frozen=True, kw_only=True):
    """Link on which the bytes of a step take longest."""

    source: str
    target: str
    mbps: float
    bytes_per_step: float


class PlanSite(msgspec.Struct, frozen=True, kw_only=True):
    """Machines at one site, in the order of their chain; the first one is the leader."""

    members: tuple[str, ...]

    @property
    def leader(self) -> str:
        return self.members[0]


class LevelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one network level, see `levels`. None: the operation is not used."""

    level: str
    codec: str
    period: int
    all_reduce: Shape | None = None
    reduce: Shape | None = None
    broadcast: Shape | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Group of machines, how they synchronise, the prediction, and the reason.

    ``order``: all members; the order of a ring, a tree or star from its root on, or site after site.
    ``utilisation``: computing time divided by wall time. ``is_allowed``: the limits allow it to be chosen.
    ``speedup``: relative to the best machine alone.
    """

    name: str
    kind: Kind
    traffic: Traffic | None
    way: Way
    codec: str
    is_exact: bool
    is_allowed: bool
    order: tuple[str, ...]
    levels: tuple[LevelPlan, ...]
    sites: tuple[PlanSite, ...]
    parts: tuple[PlanPart, ...]
    step_s: float
    samples_per_s: float
    speedup: float
    utilisation: float
    phases: StepPhases
    wire: WireTraffic
    slowest_link: SlowestLink | None
    quality: Quality
    score: float
    reason: str
    period: int = 1
    is_overlapped: bool = False
    outer: OuterRule | None = None


class PlanRanking(msgspec.Struct, frozen=True, kw_only=True):
    """Plans, the best first. ``chosen``: the first plan that the limits allow; ``reason``: why."""

    plans: tuple[Plan, ...]
    chosen: Plan
    best_alone: Plan
    reason: str
    sites: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def observation(
    plan: Plan, cluster: PlanCluster, measured_step_s: float, compute_measured_s: float | None = None
) -> Observation:
    """Return what a measured step shows about the calibration.

    The cluster's current speeds are trusted. ``compute_measured_s``: computing time of the slowest member,
    if speeds are not known better than when the plan was made.
    """
    speeds = {member.name: member.samples_per_s for member in cluster.members}
    seconds = [
        part.samples / speeds[part.name] if part.name in speeds else part.compute_s for part in plan.parts
    ]
    compute = max(seconds)
    planned = max(part.compute_s for part in plan.parts)
    wire = plan.wire
    visible = exposed_transfer(wire.factor * wire.transfer_s, wire.hideable_s, wire.last_share)
    return Observation(
        traffic=plan.traffic,
        compute_s=compute,
        transfer_s=wire.transfer_s,
        hideable_s=wire.hideable_s * compute / planned,
        last_share=wire.last_share,
        # Traffic inside sites during an inner step is communication, too, but not on this link.
        rest_s=plan.phases.overhead_s + max(0.0, plan.phases.communication_s - visible),
        measured_s=measured_step_s,
        compute_measured_s=compute_measured_s,
    )


def listed(names: Sequence[str]) -> str:
    """Join names: ``mac``, ``mac and pc``, ``mac, nas, pc and 3 others``."""
    if len(names) > _MAX_NAMED + 1:
        return f"{', '.join(names[:_MAX_NAMED])} and {len(names) - _MAX_NAMED} others"
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
