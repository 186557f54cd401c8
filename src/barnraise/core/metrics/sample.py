"""Samples: values of series, as processes hand them to the agent and the agent to the command line. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from barnraise.core.metrics.catalogue import BY_SAMPLE_NAME
from barnraise.core.metrics.series import BUCKET_LABEL
from barnraise.core.sanitize import is_printable

MAX_SAMPLES = 4096
_MAX_LABEL = 128

LabelValue = Annotated[str, Meta(max_length=_MAX_LABEL)]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One value of a series. ``labels``: in the order of the series, and then the bound of a bucket."""

    name: Annotated[str, Meta(max_length=96)]
    labels: Annotated[tuple[LabelValue, ...], Meta(max_length=8)]
    value: float


class ProcessValues(msgspec.Struct, frozen=True, array_like=True):
    """All values of one process. ``instance``: another one after each start of the process."""

    source: Literal["worker", "communication"]
    instance: Annotated[bytes, Meta(min_length=8, max_length=8)]
    samples: Annotated[tuple[Sample, ...], Meta(max_length=MAX_SAMPLES)]


def accepted(values: ProcessValues) -> tuple[Sample, ...]:
    """Return the samples that the catalogue has for this kind of process. A script may send anything."""
    return tuple(sample for sample in values.samples if _is_known(sample, values.source))


def is_cumulative(name: str) -> bool:
    """Tell whether a sample of this name only grows while its process runs."""
    return BY_SAMPLE_NAME[name].kind != "gauge"


def label_names(name: str) -> tuple[str, ...]:
    """Return the names of the labels of a sample that Prometheus sees."""
    series = BY_SAMPLE_NAME[name]
    return (*series.labels, BUCKET_LABEL) if name.endswith("_bucket") else series.labels


def value_of(samples: Iterable[Sample], name: str, *labels: str) -> float | None:
    """Return the value of one sample, or None if there is none."""
    return next((each.value for each in samples if each.name == name and each.labels == labels), None)


def _is_known(sample: Sample, source: str) -> bool:
    series = BY_SAMPLE_NAME.get(sample.name)
    if series is None or series.source != source:
        return False
    labels = sample.labels
    if sample.name.endswith("_bucket"):
        if not labels or labels[-1] not in _bounds(series.buckets):
            return False
        labels = labels[:-1]
    if len(labels) != len(series.own_labels) or not all(map(is_printable, labels)):
        return False
    return series.kind == "gauge" or (math.isfinite(sample.value) and sample.value >= 0)


def _bounds(buckets: tuple[float, ...]) -> set[str]:
    return {*(str(float(bound)) for bound in buckets), "+Inf"}
