"""Table of codecs for the planner (besides their registry): size, speed, and expected cost in loss. Pure.

The costs of int8, int4 and top-k are our own measurements, of a small transformer in a short training (see
docs/benchmarks/plans.md). So are the speeds, on one core with AVX-512. The other costs are starting values.
Pass measured codecs in `PlanLimits.codecs`, as sessions do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,31}\Z")]
LossShare = Annotated[float, Meta(ge=0, le=10)]

EXACT = "exact"
# The largest 1.56 % of the values, each with 2 bits of value and 12 bits of index.
_SPARSE_BYTES = 0.0156 * (2 + 12) / 8
# A merged sparse sum takes at most four bits for each parameter.
_MERGED_BYTES = 0.5


class PlanCodec(msgspec.Struct, frozen=True, kw_only=True):
    """Codec that encodes gradients for sending.

    ``mb_per_s``: speed of encoding and decoding full gradients; None if there is no work. ``gathers``:
    encoded gradients cannot be added, so an all-gather replaces the all-reduce. The costs are relative
    losses: of gradients at every step, and of the change of a local SGD round.
    """

    name: Name
    bytes_per_parameter: Annotated[float, Meta(gt=0, le=16)]
    mb_per_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    gathers: bool = False
    step_cost: LossShare = 0.0
    round_cost: LossShare = 0.0
    source: Annotated[str, Meta(max_length=300)] = ""

    @property
    def is_exact(self) -> bool:
        return self.name == EXACT


class PlanPayload(NamedTuple):
    """Bytes that one machine sends of its gradients."""

    size: float
    gathers: bool = False
    largest: float = 0.0

    def merged(self, machines: int) -> float:
        """Return the size of the sum of this many machines."""
        return min(machines * self.size, max(self.largest, self.size)) if self.gathers else self.size


def payload(codec: PlanCodec, parameters: int) -> PlanPayload:
    """Return the size of a model's gradients in this codec."""
    size = codec.bytes_per_parameter * parameters
    return PlanPayload(size, codec.gathers, _MERGED_BYTES * parameters if codec.gathers else 0.0)


def exact_codec(wire_bytes: float) -> PlanCodec:
    """Return the codec that sends gradients unchanged."""
    return PlanCodec(name=EXACT, bytes_per_parameter=wire_bytes, source="nothing is changed")


LOSSY: tuple[PlanCodec, ...] = (
    PlanCodec(
        name="fp16",
        bytes_per_parameter=2.0,
        mb_per_s=1000.0,
        step_cost=0.001,
        source="an assumption: rounded once a step, and sums may leave its range",
    ),
    PlanCodec(
        name="bf16",
        bytes_per_parameter=2.0,
        mb_per_s=1000.0,
        step_cost=0.001,
        source="an assumption: rounded once a step; the usual form of gradients in large trainings",
    ),
    PlanCodec(
        name="int8",
        bytes_per_parameter=1.0,
        mb_per_s=1200.0,
        step_cost=0.001,
        source="no cost was seen for what local steps changed at 10 billion parameters (arXiv 2412.01152); "
        "at every step none that we could measure",
    ),
    PlanCodec(
        name="int4",
        bytes_per_parameter=0.5,
        mb_per_s=800.0,
        step_cost=0.018,
        round_cost=0.002,
        source="no cost was seen for what local steps changed up to 4 billion parameters (arXiv 2501.18512), "
        "0.1 % in a small model of ours; at every step 1.8 % there",
    ),
    PlanCodec(
        name="topk",
        bytes_per_parameter=_SPARSE_BYTES,
        mb_per_s=400.0,
        gathers=True,
        step_cost=0.1,
        round_cost=0.1,
        source="no cost with local steps at 512 million parameters (arXiv 2508.15706) nor at every step of "
        "small vision models (arXiv 1712.01887); in a short training of a small transformer of ours 11 % "
        "both ways",
    ),
    PlanCodec(
        name="powersgd",
        bytes_per_parameter=0.008,
        mb_per_s=500.0,
        step_cost=0.005,
        source="rank 4; said to be small and to depend on the rank (arXiv 1905.13727): an assumption",
    ),
)
# The size of PowerSGD's form depends on the model's shapes: a script may use it, a plan does not.
CHOOSABLE = tuple(codec for codec in LOSSY if codec.name != "powersgd")

# Codecs for the change of a local SGD round, in the order in which they are tried.
LADDER = ("bf16", "int8", "int4", "topk")


def ladder(codecs: Sequence[PlanCodec]) -> tuple[PlanCodec, ...]:
    """Return the codecs for local SGD rounds, in the order in which they are tried."""
    known = {codec.name: codec for codec in codecs}
    return tuple(known[name] for name in LADDER if name in known)
