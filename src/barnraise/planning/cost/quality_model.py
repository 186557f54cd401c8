"""Expected loss of local SGD, the longest useful round, and the outer optimizer. Pure.

The figures come from publications, mostly at small scale. docs/plans.md says how reliable they are.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.planning.inputs.codecs import LossShare, PlanCodec

LONGEST_PERIOD = 500
_LARGE_MODEL = 1_000_000_000
_LARGEST_TESTED_GROUP = 16


class LocalCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Relative loss that rounds of a given length cost, for a model of ``parameters``.

    Larger models lose less, by the power ``shrinks`` of their size, down to ``min_share`` of the figure.
    Smaller models are assumed to lose as much as the reference.
    """

    points: Annotated[tuple[tuple[int, LossShare], ...], Meta(min_length=1, max_length=64)] = (
        (1, 0.0),
        (25, 0.028),
        (50, 0.047),
        (100, 0.063),
        (200, 0.074),
        (500, 0.094),
    )
    parameters: Annotated[int, Meta(ge=1)] = 51_000_000
    shrinks: Annotated[float, Meta(ge=0, le=1)] = 0.25
    min_share: Annotated[float, Meta(ge=0, le=1)] = 0.375
    source: Annotated[str, Meta(max_length=300)] = (
        "public measurements of a model of 51 million parameters on 2 workers (Neumann-Labs/ft-diloco), "
        "smaller for larger models as the 1.2 % at 2.4 billion (arXiv 2503.09799) suggest"
    )

    def __post_init__(self) -> None:
        periods = [period for period, _ in self.points]
        if periods != sorted(set(periods)) or periods[0] < 1:
            raise ValueError("the points of a curve must be in order of their periods, starting at 1")


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """Expected relative loss of a plan, and the source of the figure."""

    cost: float = 0.0
    source: str = "the same mathematics as on one machine"


class OuterRule(msgspec.Struct, frozen=True, kw_only=True):
    """Outer optimizer that applies the mean change of a round."""

    learning_rate: float
    momentum: float
    error_feedback: float = 0.0


def local_cost(curve: LocalCurve, period: int, parameters: int) -> float:
    """Interpolate the curve over the logarithm of the period; it is flat beyond the last point."""
    shrunk: float = (parameters / curve.parameters) ** -curve.shrinks
    scale = max(curve.min_share, min(1.0, shrunk))
    points = curve.points
    if period <= points[0][0]:
        return points[0][1] * scale
    for (shorter, less), (longer, more) in pairwise(points):
        if period <= longer:
            part = math.log(period / shorter) / math.log(longer / shorter)
            return (less + part * (more - less)) * scale
    return points[-1][1] * scale


def local_quality(curve: LocalCurve, codec: PlanCodec, period: int, parameters: int, workers: int) -> Quality:
    source = curve.source
    if codec.round_cost:
        source += f"; {codec.name}: {codec.source}"
    if workers > _LARGEST_TESTED_GROUP:
        source += f"; no test with more than {_LARGEST_TESTED_GROUP} workers is known to us"
    return Quality(cost=local_cost(curve, period, parameters) + codec.round_cost, source=source)


def period_limit(parameters: int) -> int:
    """Return the longest recommended round; a longer one is used only if nothing else is better."""
    return 64 if parameters < _LARGE_MODEL else 128


def outer_rule(codec: PlanCodec, period: int, *, is_lora: bool) -> OuterRule:
    """Return the outer optimizer of a plan.

    Sparse changes are added as they are; the others use momentum. Values below 100 steps are our
    measurements.
    """
    if codec.gathers:
        return OuterRule(learning_rate=1.0, momentum=0.0, error_feedback=0.95)
    if is_lora:
        return OuterRule(learning_rate=0.7, momentum=0.0)
    if period >= 100:
        return OuterRule(learning_rate=0.7, momentum=0.9)
    # In short rounds the delayed mean makes higher momentum oscillate.
    return OuterRule(learning_rate=1.0, momentum=0.5 if period < 8 else 0.7 if period < 32 else 0.6)
