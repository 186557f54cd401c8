"""Calibration of predictions by measured steps. Pure.

A step takes the time of computing and the visible part of the communication. Computing has one factor for
all plans. Communication has one factor for each kind of traffic. Encryption, additions, other traffic and
TCP itself make it slower than the link arithmetic.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Traffic = Literal["every_step", "compressed", "local_steps"]
Factor = Annotated[float, Meta(gt=0, le=1000)]

# Our encrypted all-reduce takes 1.01 to 1.06 of the link's own time (docs/benchmarks/collectives.md);
# others measured 1.08 to 1.92 for rounds over the internet.
DEFAULTS: dict[Traffic, float] = {"every_step": 1.1, "compressed": 1.1, "local_steps": 1.5}
MIN_FACTOR, MAX_FACTOR = 0.25, 16.0
_MIN_WEIGHT = 0.3
# Less communication than this share of a step cannot be measured.
_MIN_VISIBLE = 0.01


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted factor of one kind of traffic, and its number of observations."""

    traffic: Traffic
    factor: Factor
    seen: Annotated[int, Meta(ge=1)]


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Factors of computing and communication; `refit` returns the next version."""

    compute: Factor = 1.0
    compute_seen: Annotated[int, Meta(ge=0)] = 0
    fitted: Annotated[tuple[Fitted, ...], Meta(max_length=len(DEFAULTS))] = ()

    def factor(self, traffic: Traffic) -> float:
        """Return the factor of a kind of traffic.

        A kind without observations is assumed to be off as much as the observed ones.
        """
        known = {fit.traffic: fit.factor for fit in self.fitted}
        if traffic in known:
            return known[traffic]
        off = [math.log(factor / DEFAULTS[kind]) for kind, factor in known.items()]
        return _bounded(DEFAULTS[traffic] * math.exp(sum(off) / len(off))) if off else DEFAULTS[traffic]


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction before calibration, and the measured step: means over some commits.

    ``transfer_s``: seconds of communication, of which computing of ``hideable_s`` hides all but
    ``last_share``. ``rest_s`` is always added. ``compute_measured_s`` separates the two factors; without it
    the predicted computing is used. ``traffic``: None for one machine alone.
    """

    traffic: Traffic | None
    compute_s: float
    transfer_s: float
    hideable_s: float
    last_share: float
    rest_s: float
    measured_s: float
    compute_measured_s: float | None = None


def exposed_transfer(transfer_s: float, hideable_s: float, last_share: float) -> float:
    """Return the communication that computing cannot hide: at least the last bucket."""
    return max(transfer_s * last_share, transfer_s - hideable_s * (1 - last_share))


def refit(calibration: Calibration, observation: Observation) -> Calibration:
    """Return the calibration after an observation; the first counts fully, later ones at least a third."""
    if not (math.isfinite(observation.measured_s) and observation.measured_s > 0):
        return calibration
    compute = observation.compute_measured_s
    if observation.traffic is None and compute is None:
        compute = observation.measured_s - observation.rest_s
    fitted, seen = calibration.compute, calibration.compute_seen
    if compute is not None and compute > 0 and observation.compute_s > 0:
        fitted = _moved(fitted, compute / observation.compute_s, seen)
        seen += 1
    changed = msgspec.structs.replace(calibration, compute=fitted, compute_seen=seen)
    if observation.traffic is None or observation.transfer_s <= 0:
        return changed
    return _refit_traffic(changed, observation, observation.traffic, compute)


def _refit_traffic(
    calibration: Calibration, observation: Observation, traffic: Traffic, compute: float | None
) -> Calibration:
    busy = calibration.compute * observation.compute_s if compute is None else compute
    slower = busy / observation.compute_s if observation.compute_s > 0 else 1.0
    hideable = observation.hideable_s * slower * (1 - observation.last_share)
    visible = max(0.0, observation.measured_s - busy - observation.rest_s)
    # The factor at which `exposed_transfer` would give what was visible.
    factor = (visible + hideable) / observation.transfer_s
    if observation.last_share > 0:
        factor = min(factor, visible / (observation.last_share * observation.transfer_s))
    old = calibration.factor(traffic)
    known = {fit.traffic: fit for fit in calibration.fitted}
    seen = known[traffic].seen if traffic in known else 0
    # If all communication is hidden, the link may be faster still: only a lower factor is evidence.
    is_seen = visible > _MIN_VISIBLE * observation.measured_s
    moved = _moved(old, factor, seen) if is_seen or factor < old else old
    known[traffic] = Fitted(traffic=traffic, factor=moved, seen=seen + 1)
    fitted = tuple(known[name] for name in DEFAULTS if name in known)
    return msgspec.structs.replace(calibration, fitted=fitted)


def _moved(old: float, new: float, seen: int) -> float:
    weight = max(_MIN_WEIGHT, 1 / (seen + 1))
    return _bounded(math.exp((1 - weight) * math.log(old) + weight * math.log(_bounded(new))))


def _bounded(factor: float) -> float:
    return min(MAX_FACTOR, max(MIN_FACTOR, factor))
