"""Prometheus metrics of a hub. Labels have few values and never name a member."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from barnraise.hub.object_store.uploader import BucketUploader
from barnraise.hub.server.hub import Hub
from barnraise.hub.storage.log import CommittedRound

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class HubMetrics:
    """Metrics of one hub, in a registry of their own."""

    def __init__(self, hub: Hub, stock: BucketUploader | None = None) -> None:
        self._registry = registry = CollectorRegistry(auto_describe=True)
        self._answers = Counter(
            "barnraise_hub_answers", "Responses by route and status.", ("route", "status"), registry=registry
        )
        self._seconds = Histogram(
            "barnraise_hub_answer_seconds",
            "Time from request headers to response, without long polls.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._received = Counter(
            "barnraise_hub_received_bytes", "Bytes of request bodies.", registry=registry
        )
        self._samples = Counter("barnraise_hub_samples", "Samples in committed versions.", registry=registry)
        self._updates = Counter("barnraise_hub_updates", "Updates in committed versions.", registry=registry)
        self._commits = Histogram(
            "barnraise_hub_commit_seconds",
            "Duration of log commits.",
            buckets=_SECONDS,
            registry=registry,
        )
        hub.disk.on_commit = self._commits.observe
        figures = {
            "slow_disk": ("1 if the disk is slow.", lambda: float(hub.disk.slow_s() is not None)),
            "troubles": (
                "Current health warnings.",
                lambda: float(len(hub.health.current())),
            ),
            "version": ("Newest version.", lambda: float(hub.version or 0)),
            "members": ("Members that joined.", lambda: float(len(hub.members))),
            "quarantined": (
                "Members in quarantine.",
                lambda: float(sum(bool(member.quarantine) for member in hub.members.values())),
            ),
            "leases": ("Active leases.", lambda: float(len(hub.state.lent))),
            "waiting": ("Pending updates.", lambda: float(len(hub.state.waiting))),
            "refusals": ("Refusals on the status page.", lambda: float(len(hub.refusals))),
        }
        if stock is not None:
            figures["stored"] = ("Blobs in the object store.", lambda: float(stock.size))
        for name, (text, value) in figures.items():
            Gauge(f"barnraise_hub_{name}", text, registry=registry).set_function(value)

    def note_answer(self, route: str, status: int, seconds: float, received: int) -> None:
        self._answers.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        self._received.inc(received)

    def note_version(self, version: CommittedRound) -> None:
        self._updates.inc(version.members)
        self._samples.inc(version.samples)

    def text(self) -> bytes:
        return generate_latest(self._registry)
