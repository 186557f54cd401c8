from __future__ import annotations

from prometheus_client import REGISTRY

from barnraise.core import metrics


def test_render_contains_collective_metrics() -> None:
    metrics.collective_duration_seconds.labels(kind="all_reduce", strategy="ring").observe(0.002)
    metrics.collective_bytes_total.labels(kind="all_reduce", direction="sent").inc(4096)
    metrics.collective_failures_total.labels(kind="all_reduce", code="peer-lost").inc()
    metrics.links_open.set(3)
    metrics.groups_open.set(1)
    text = metrics.render().decode()
    assert (
        'barnraise_collective_duration_seconds_bucket{kind="all_reduce",le="0.0025",strategy="ring"}' in text
    )
    assert 'barnraise_collective_bytes_total{direction="sent",kind="all_reduce"}' in text
    assert 'barnraise_collective_failures_total{code="peer-lost",kind="all_reduce"}' in text
    assert "barnraise_links_open 3.0" in text
    assert "barnraise_groups_open 1.0" in text


def test_metrics_stay_out_of_default_registry() -> None:
    assert not [metric.name for metric in REGISTRY.collect() if metric.name.startswith("barnraise")]
