"""Counters, gauges and histograms of this process, in Prometheus's text format on request.

They live in a registry of their own, so that metrics of the host program neither appear in it nor collide
with it. Labels have few values on purpose: never a peer, an address or a sequence number.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

registry = CollectorRegistry(auto_describe=True)

# From a 4 KiB operation on loopback (50 microseconds) to a large model on a home uplink (minutes).
_OPERATION_BUCKETS = (
    *(5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)

collective_duration_seconds = Histogram(
    "barnraise_collective_duration_seconds",
    "Time of a collective from its call to its end.",
    labelnames=("kind", "strategy"),
    buckets=_OPERATION_BUCKETS,
    registry=registry,
)
collective_bytes_total = Counter(
    "barnraise_collective_bytes",
    "Payload bytes that collectives sent or received.",
    labelnames=("kind", "direction"),
    registry=registry,
)
collective_failures_total = Counter(
    "barnraise_collective_failures",
    "Collectives that ended in an error, by the code of the error.",
    labelnames=("kind", "code"),
    registry=registry,
)
links_open = Gauge("barnraise_links_open", "Links to other workers that are open now.", registry=registry)
groups_open = Gauge("barnraise_groups_open", "Process groups that are open now.", registry=registry)


def render() -> bytes:
    """Return all metrics of this process in Prometheus's text format."""
    return generate_latest(registry)
