"""Cost of a step: one machine alone, or a group that all-reduces at every step. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from barnraise.planning.cost.quality_model import Quality
from barnraise.planning.cost.traffic_model import Route, seconds
from barnraise.planning.inputs.codecs import PlanCodec
from barnraise.planning.inputs.problem import Group, PlanProblem
from barnraise.planning.plan.calibration import Traffic, exposed_transfer

Kind = Literal["alone", "every_step", "local_steps"]

_ERROR_FEEDBACK_BYTES = 4.0


class StepCost(NamedTuple):
    """Predicted figures of a plan. Times are for one global batch.

    ``counts``: samples of each member in a step, or inner steps of its worker in a round. ``transfer_s``:
    seconds of communication before calibration. Computing of ``hideable_s`` can hide all of it but
    ``last_share``. ``is_fixed``: the user has set the period.
    """

    kind: Kind
    group: Group
    route: Route
    codec: PlanCodec
    counts: tuple[int, ...]
    compute_s: float
    waiting_s: float
    communication_s: float
    overhead_s: float
    transfer_s: float
    hideable_s: float
    last_share: float
    codec_s: float
    quality: Quality
    batch: int
    period: int = 1
    overlapped: bool = False
    inner: tuple[StepCost, ...] = ()
    remark: str = ""
    is_proposed: bool = True
    is_fixed: bool = False

    @property
    def step_s(self) -> float:
        return self.compute_s + self.waiting_s + self.communication_s + self.overhead_s

    @property
    def samples_per_s(self) -> float:
        return self.batch / self.step_s

    @property
    def is_exact(self) -> bool:
        return self.kind != "local_steps" and self.codec.is_exact

    @property
    def shares_inside(self) -> bool:
        """Return True if the workers of local SGD are sites whose machines share every step."""
        return any(len(cost.group) > 1 for cost in self.inner)

    @property
    def traffic(self) -> Traffic | None:
        if self.kind == "alone":
            return None
        if self.kind == "local_steps":
            return "local_steps"
        return "every_step" if self.codec.is_exact else "compressed"


def score(price: StepCost, speed_per_loss: float) -> float:
    """Return the samples per second, reduced by the expected loss; plans are ranked by this score."""
    return price.samples_per_s / (1 + speed_per_loss * price.quality.cost)


def memory_needed(
    problem: PlanProblem, codec: PlanCodec, *, local: bool = False, overlapped: bool = False
) -> float:
    """Return the bytes on each device: model state, one micro-batch, and the state of codecs and rounds."""
    model = problem.model
    each = model.state_bytes
    each += 0.0 if codec.is_exact else _ERROR_FEEDBACK_BYTES
    # A round keeps its starting weights and a momentum; with overlap also the change in flight.
    each += 8.0 if local else 0.0
    each += 4.0 if overlapped else 0.0
    return model.parameters * each + model.activation_bytes_per_sample * problem.profile.unit_size


def fits(problem: PlanProblem, group: Group, needed: float) -> bool:
    """Return True if the group has the memory; a machine of unknown memory passes."""
    memories = (problem.cluster.members[member].memory_bytes for member in group)
    return all(memory == 0 or needed <= memory for memory in memories)


def cost_alone(problem: PlanProblem, member: int, batch: int) -> StepCost:
    return StepCost(
        kind="alone",
        group=(member,),
        route=Route("none", (member,)),
        codec=problem.exact,
        counts=(batch,),
        compute_s=batch / problem.speeds[member],
        waiting_s=0.0,
        communication_s=0.0,
        overhead_s=problem.profile.overhead_s,
        transfer_s=0.0,
        hideable_s=0.0,
        last_share=0.0,
        codec_s=0.0,
        quality=Quality(),
        batch=batch,
    )


def cost_step(
    problem: PlanProblem, group: Group, route: Route, codec: PlanCodec, batch: int
) -> StepCost | None:
    """Return the cost of a group that all-reduces at every step.

    Return None if a member would get no micro-batch or has no path.
    """
    work = problem.work(group, batch)
    transfer = seconds(route, problem.links, problem.payload(codec), problem.model.gradient_bytes)
    if work is None or transfer == float("inf"):
        return None
    compute = batch / problem.speed(group)
    last_share = min(1.0, problem.profile.bucket_bytes / problem.model.gradient_bytes)
    factor = problem.calibration.factor("every_step" if codec.is_exact else "compressed")
    codec_s = problem.codec_s(codec)
    quality = Quality() if codec.is_exact else Quality(cost=codec.step_cost, source=codec.source)
    hideable = (
        work.hideable_s if codec.is_exact else 0.0
    )  # an encoded gradient is sent only when it is complete
    return StepCost(
        kind="every_step",
        group=group,
        route=route,
        codec=codec,
        counts=tuple(work.samples),
        compute_s=compute,
        waiting_s=max(0.0, work.longest_s - compute),
        communication_s=exposed_transfer(factor * transfer, hideable, last_share) + codec_s,
        overhead_s=problem.profile.overhead_s,
        transfer_s=transfer,
        hideable_s=hideable,
        last_share=last_share,
        codec_s=codec_s,
        quality=quality,
        batch=batch,
    )
