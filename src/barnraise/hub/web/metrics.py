"""Prometheus metrics of a hub. Labels have few values and never name a member."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from barnraise.core.metrics import MetricRegistry, Series, catalogue, render
from barnraise.hub.server.hub import Hub
from barnraise.hub.storage.log import CommittedRound

if TYPE_CHECKING:
    from barnraise.hub.object_store.uploader import BucketUploader


class HubMetrics:
    """Metrics of one hub, in a registry of their own."""

    def __init__(self, hub: Hub, stock: BucketUploader | None = None) -> None:
        self._registry = MetricRegistry()
        hub.disk.on_commit = self._registry.histogram(catalogue.HUB_COMMIT_TIME).observe
        figures: dict[Series, Callable[[], float]] = {
            catalogue.HUB_SLOW_DISK: lambda: hub.disk.slow_s() is not None,
            catalogue.HUB_TROUBLES: lambda: len(hub.health.current()),
            catalogue.HUB_VERSION: lambda: hub.version or 0,
            catalogue.HUB_MEMBERS: lambda: len(hub.members),
            catalogue.HUB_QUARANTINED: lambda: sum(
                bool(member.quarantine) for member in hub.members.values()
            ),
            catalogue.HUB_LEASES: lambda: len(hub.state.lent),
            catalogue.HUB_WAITING: lambda: len(hub.state.waiting),
            catalogue.HUB_REFUSALS: lambda: len(hub.refusals),
        }
        if stock is not None:
            figures[catalogue.HUB_STORED] = lambda: stock.size
        for series, value in figures.items():
            self._registry.gauge(series).set_function(value)

    def note_answer(self, route: str, status: int, seconds: float, received: int) -> None:
        self._registry.counter(catalogue.HUB_ANSWERS, route, str(status)).inc()
        self._registry.histogram(catalogue.HUB_ANSWER_TIME, route).observe(seconds)
        self._registry.counter(catalogue.HUB_RECEIVED).inc(received)

    def note_version(self, version: CommittedRound) -> None:
        self._registry.counter(catalogue.HUB_UPDATES).inc(version.members)
        self._registry.counter(catalogue.HUB_SAMPLES).inc(version.samples)

    def text(self) -> bytes:
        return render(self._registry.samples())
