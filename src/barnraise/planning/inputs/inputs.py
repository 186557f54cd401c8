"""What is trained, how a step of it runs, and what a plan may do. Pure."""

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
    """What is trained.

    ``state_bytes`` per parameter: weights, gradient and two moments of an optimizer (16), and the two sums of
    a step (8). ``flops_per_sample``, forward and backward, is only needed where no speed was measured.
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
    """How a step runs: one global ``batch``, dealt in units of ``unit`` samples (0: an eighth of it).

    Gradients travel while backward runs: that of a member's last unit, as the session does it, or with
    ``travels="step"`` that of all its work, as in a script with one backward pass for each step. The last
    bucket has nothing left to hide behind. ``overhead_s`` is added to each step, on one machine as well.
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
    """What a plan may do, and what it aims at.

    ``speed_per_loss``: how much faster a plan has to be to be worth its expected loss. 10: a plan that costs
    1 % of the loss counts as if it were 10 % slower, since about 10 % more samples would win that 1 % back.
    ``most_plans``: how many of the plans are shown at most. ``is_given``: the group is, all its machines
    take part. ``is_flat``: as sessions do it, each machine takes local steps by itself, and what is encoded
    goes through sites just where links tell them apart. ``overlaps``: whether a round's changes travel while
    the next one is computed; None: whichever is better. ``least_machines``: of what is chosen.
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
            raise ValueError(f"each codec has a name of its own, and none is called {EXACT!r}")
