"""Series: the name, kind, unit, labels and meaning of one metric. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["agent", "device", "worker", "communication", "hub"]
Unit = Literal["", "bytes", "seconds", "time", "ratio", "celsius", "watts"]

RUN_LABELS = ("run", "worker")
BUCKET_LABEL = "le"


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of the catalogue.

    ``source``: the process that counts it; ``device``: read by the agent from sensors. ``own_labels``: those
    that this process sets. The agent adds the run and the number of the worker on its machine to values of
    workers and communication processes. ``unit``: what a person reads; "time" is seconds since 1970.
    """

    name: str
    kind: Kind
    source: Source
    help: str
    unit: Unit = ""
    own_labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels that Prometheus sees, without the one of buckets."""
        is_of_run = self.source in ("worker", "communication")
        return (*RUN_LABELS, *self.own_labels) if is_of_run else self.own_labels

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Return the names of the samples: a histogram has three."""
        if self.kind == "histogram":
            return tuple(self.name + suffix for suffix in ("_bucket", "_sum", "_count"))
        return (self.name,)
