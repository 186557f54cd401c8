"""Registry: values of the catalogue, in Prometheus's text, apart from metrics of the host program."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from barnraise.core.metrics import MetricRegistry, Sample, catalogue, registry, render
from barnraise.core.metrics.sample import value_of


@pytest.fixture
def counted() -> MetricRegistry:
    own = MetricRegistry()
    own.counter(catalogue.STEPS).inc(3)
    own.counter(catalogue.COLLECTIVE_FAILURES, "all_reduce", "peer-lost").inc()
    own.histogram(catalogue.STEP_TIME).observe(0.2)
    own.gauge(catalogue.LOSS).set(0.5)
    return own


def test_samples_have_the_labels_of_their_process(counted: MetricRegistry) -> None:
    samples = counted.samples()
    assert value_of(samples, "barnraise_steps_total") == 3
    assert value_of(samples, "barnraise_collective_failures_total", "all_reduce", "peer-lost") == 1
    assert value_of(samples, "barnraise_step_seconds_bucket", "0.1") == 0
    assert value_of(samples, "barnraise_step_seconds_bucket", "0.25") == 1
    assert value_of(samples, "barnraise_step_seconds_sum") == 0.2
    assert not [sample for sample in samples if "created" in sample.name]


def test_series_that_nothing_counts_has_no_value(counted: MetricRegistry) -> None:
    assert value_of(counted.samples(), "barnraise_samples_total") is None


def test_text_is_what_prometheus_reads(counted: MetricRegistry) -> None:
    samples = [Sample(each.name, ("spiral", "0", *each.labels), each.value) for each in counted.samples()]
    families = {family.name: family for family in text_string_to_metric_families(render(samples).decode())}
    assert families["barnraise_steps"].type == "counter"
    (step,) = families["barnraise_steps"].samples
    assert (step.name, step.labels) == ("barnraise_steps_total", {"run": "spiral", "worker": "0"})
    assert families["barnraise_step_seconds"].type == "histogram"
    assert families["barnraise_loss"].samples[0].value == 0.5


def test_labels_of_text_are_escaped() -> None:
    text = render([Sample(catalogue.AGENT_ROUND_TRIP.name, ('a"\n\\',), 1.0)]).decode()
    (family,) = text_string_to_metric_families(text)
    assert family.samples[0].labels == {"machine": 'a"\n\\'}


def test_metrics_stay_out_of_the_default_registry() -> None:
    registry.counter(catalogue.STEPS)
    assert not [metric.name for metric in REGISTRY.collect() if metric.name.startswith("barnraise")]


def test_series_is_used_as_its_kind() -> None:
    with pytest.raises(AssertionError, match="barnraise_steps_total"):
        MetricRegistry().gauge(catalogue.STEPS)
