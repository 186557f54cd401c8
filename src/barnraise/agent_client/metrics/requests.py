"""Requests about metrics to this machine's agent, and the response. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.metrics import ProcessValues, Sample

MAX_ANSWERED = 6000


class MetricsReport(msgspec.Struct, frozen=True, tag="metrics"):
    """Report of a worker: all values of it and of its communication process."""

    run: Annotated[str, Meta(min_length=1, max_length=64)]
    local_rank: Annotated[int, Meta(ge=0, le=64)]
    processes: Annotated[tuple[ProcessValues, ...], Meta(max_length=2)]


class MetricsRequest(msgspec.Struct, frozen=True, tag="metrics?"):
    """Request for all metrics of this machine."""


class MetricsResponse(msgspec.Struct, frozen=True, tag="metrics!"):
    """All samples of this machine but those of buckets, and the port for Prometheus; 0: none."""

    samples: Annotated[tuple[Sample, ...], Meta(max_length=MAX_ANSWERED)]
    port: int = 0
