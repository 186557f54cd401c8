"""Model, step and limits that a plan is made for. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from barnraise.planning.cost.quality_model import LocalCurve
from barnraise.planning.inputs.codecs import EXACT, LOSSY, PlanCodec
from barnraise.planning.inputs.levels import Levels, Sync

Share = Annotated[float, Meta(ge=0, le=1)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Positive = Annotated[int, Meta(ge=1, le=1 << 50)]


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the model that is trained.

    ``state_bytes`` per parameter: weights, gradient and two optimizer moments (16), and two gradient buffers
    (8). ``flops_per_sample``: forward and backward; needed only if no speed was measured.
    """

    parameters: Positive
    wire_bytes: Annotated[float, Meta(gt=0, le=16)] = 4.0
    state_bytes: Annotated[float, Meta(ge=0, le=1024)] = 24.0
    activation_bytes_per_sample: Amount = 0.0
    flops_per_sample: Annotated[float, Meta(gt=0, le=1e21)] | None = None
    is_lora: bool = False

    @property
    def gradient_bytes(self) -> float:
        return self.parameters * self.wire_bytes


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Timing of a step: one global ``batch``, split into micro-batches of ``unit`` samples (0: an eighth of
    it).

    Gradients are sent during backward: in a session during a member's last micro-batch. With
    ``travels="step"`` they are sent during all of its work, as in a script with one backward pass per step.
    Nothing hides the last bucket. ``overhead_s`` is added to each step, also on one machine.
    """

    batch: Positive
    unit: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    backward_share: Share = 2 / 3
    travels: Literal["last_unit", "step"] = "last_unit"
    bucket_bytes: Positive = 16 << 20
    overhead_s: Annotated[float, Meta(ge=0, le=1e6)] = 0.002

    @property
    def unit_size(self) -> int:
        return min(self.batch, self.unit or max(1, self.batch // 8))


class PlanLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and goals of a plan.

    ``speed_per_loss``: how much faster a plan must be to be worth its expected loss. With 10, a plan that
    costs 1 % of the loss counts as 10 % slower, because about 10 % more samples would recover that 1 %.

    ``most_plans``: how many plans are shown. ``is_given``: the group is fixed, so all its machines take
    part. ``is_flat``: as in sessions, each machine takes local steps alone, and encoded gradients go through
    separate sites. ``overlaps``: send a round's change during the next round; None chooses the better way.
    ``least_machines``: the smallest group that may be chosen.
    """

    sync: Sync = "exact"
    utilisation: Annotated[float, Meta(gt=0, lt=1)] = 0.92
    codecs: Annotated[tuple[PlanCodec, ...], Meta(max_length=32)] = LOSSY
    local_steps: bool = True
    local_curve: LocalCurve = LocalCurve()
    levels: Levels = Levels()
    speed_per_loss: Annotated[float, Meta(ge=0, le=1000)] = 10.0
    most_plans: Annotated[int, Meta(ge=1, le=1000)] = 40
    is_given: bool = False
    is_flat: bool = False
    overlaps: bool | None = None
    least_machines: Annotated[int, Meta(ge=1)] = 1

    def __post_init__(self) -> None:
        names = [codec.name for codec in self.codecs]
        if len(names) != len(set(names)) or EXACT in names:
            raise ValueError(f"codec names must be unique and must not be {EXACT!r}")
