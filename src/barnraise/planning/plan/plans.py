"""What planning answers with: plans with their predictions, and the one that is chosen. Frozen, and JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from barnraise.planning.cost.quality_model import OuterRule, Quality
from barnraise.planning.cost.step_cost import Kind
from barnraise.planning.cost.traffic_model import Way
from barnraise.planning.inputs.cluster import PlanCluster
from barnraise.planning.inputs.levels import Shape
from barnraise.planning.plan.calibration import Observation, Traffic, exposed_transfer

_MOST_NAMED = 4


class StepPhases(msgspec.Struct, frozen=True, kw_only=True):
    """Where the seconds of a step go; together they are the step.

    ``compute_s``: if nobody ever waited. ``waiting_s``: for who is last. ``communication_s``: what computing
    does not hide, with the codec's work. Local steps: a round's, divided by its steps.
    """

    compute_s: float
    communication_s: float
    waiting_s: float
    overhead_s: float


class WireTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """The communication of a step as arithmetic has it, and the factor that calibration multiplies it by."""

    transfer_s: float
    factor: float
    hideable_s: float
    last_share: float
    codec_s: float


class PlanPart(msgspec.Struct, frozen=True, kw_only=True):
    """One machine's part in a step. ``inner_steps``: of its worker, in a round of local steps."""

    name: str
    samples: float
    compute_s: float
    sends_bytes: float
    receives_bytes: float
    memory_bytes: float
    inner_steps: int | None = None


class SlowestLink(msgspec.Struct, frozen=True, kw_only=True):
    """The path on which a step's bytes take longest."""

    source: str
    target: str
    mbps: float
    bytes_per_step: float


class PlanSite(msgspec.Struct, frozen=True, kw_only=True):
    """Machines at one place, in the order of their chain; the leader, which speaks for them, is the first."""

    members: tuple[str, ...]

    @property
    def leader(self) -> str:
        return self.members[0]


class LevelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How one level of the network works together: see `levels`. None: the operation is not used."""

    level: str
    codec: str
    period: int
    all_reduce: Shape | None = None
    reduce: Shape | None = None
    broadcast: Shape | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Who trains together and how, what is predicted, and why.

    ``order``: all members; of a ring in its order, of a tree or star from its root on, of sites one after the
    other. ``utilisation``: computing over wall time. ``is_allowed``: whether the options let it be chosen.
    ``speedup``: over the best machine alone.
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
    """Plans, the best first. ``chosen`` is the first one that the options allow, and ``reason`` says why."""

    plans: tuple[Plan, ...]
    chosen: Plan
    best_alone: Plan
    reason: str
    sites: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def observation(
    plan: Plan, cluster: PlanCluster, measured_step_s: float, compute_measured_s: float | None = None
) -> Observation:
    """What a measured step says about the calibration.

    The cluster's speeds are believed, as they are now. ``compute_measured_s``: how long the last member
    computed, if speeds are not known any better than when the plan was made.
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
        # What sites exchange inside of an inner step is communication, too, but not on this wire.
        rest_s=plan.phases.overhead_s + max(0.0, plan.phases.communication_s - visible),
        measured_s=measured_step_s,
        compute_measured_s=compute_measured_s,
    )


def listed(names: Sequence[str]) -> str:
    """``mac``, ``mac and pc``, ``mac, nas, pc and 3 others``."""
    if len(names) > _MOST_NAMED + 1:
        return f"{', '.join(names[:_MOST_NAMED])} and {len(names) - _MOST_NAMED} others"
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
