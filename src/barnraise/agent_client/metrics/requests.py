"""Requests about metrics to this machine's agent, and the response. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

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


HealthState = Literal["ok", "degraded", "failing"]


class HealthRequest(msgspec.Struct, frozen=True, tag="health?"):
    """Request for the health of this machine's agent."""


class HealthResponse(msgspec.Struct, frozen=True, kw_only=True, tag="health"):
    """Health of this machine's agent: failing if it cannot do its work, degraded if a person should look."""

    state: HealthState
    problems: tuple[str, ...] = ()
    machine: str = ""
    cluster: str = ""
    version: str = ""
    up_s: float = 0.0
    online: int = 0  # machines of the cluster, this one included
    machines: int = 0
    runs: int = 0  # that use this machine now
    paused: str = ""  # why runs of other machines may not use it now
