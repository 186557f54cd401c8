"""Registry: the values that this process counts, and Prometheus's text of samples."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from barnraise.core.metrics.catalogue import BY_SAMPLE_NAME
from barnraise.core.metrics.sample import Sample, label_names
from barnraise.core.metrics.series import BUCKET_LABEL, Series

M = TypeVar("M", Counter, Gauge, Histogram)


class MetricRegistry:
    """Values of one process. A series appears with its first use, so what nothing counts has no value."""

    def __init__(self) -> None:
        self._prometheus = CollectorRegistry(auto_describe=True)
        self._made: dict[str, Counter | Gauge | Histogram] = {}
        self._series: dict[str, Series] = {}
        self._lock = threading.Lock()

    def counter(self, series: Series, *labels: str) -> Counter:
        """Return the counter of a series with these values of its own labels."""
        return _child(self._metric(Counter, series), labels)

    def gauge(self, series: Series, *labels: str) -> Gauge:
        """Return the gauge of a series with these values of its own labels."""
        return _child(self._metric(Gauge, series), labels)

    def histogram(self, series: Series, *labels: str) -> Histogram:
        """Return the histogram of a series with these values of its own labels."""
        return _child(self._metric(Histogram, series), labels)

    def samples(self) -> list[Sample]:
        """Return all values of now."""
        samples = []
        for metric in self._prometheus.collect():
            for sample in metric.samples:
                series = BY_SAMPLE_NAME.get(sample.name)
                if series is None:  # the time of its creation
                    continue
                names = (*series.own_labels, *((BUCKET_LABEL,) if BUCKET_LABEL in sample.labels else ()))
                labels = tuple(sample.labels[name] for name in names)
                samples.append(Sample(sample.name, labels, float(sample.value)))
        return samples

    def _metric(self, kind: type[M], series: Series) -> M:
        made = self._made.get(series.name)
        if made is None:
            with self._lock:
                made = self._made.get(series.name)
                if made is None:
                    made = self._made[series.name] = self._make(series)
        assert isinstance(made, kind), f"{series.name} is no {kind.__name__}"
        return made

    def _make(self, series: Series) -> Counter | Gauge | Histogram:
        name, text, labels = series.name, series.help, series.own_labels
        if series.kind == "counter":
            return Counter(name, text, labels, registry=self._prometheus)
        if series.kind == "gauge":
            return Gauge(name, text, labels, registry=self._prometheus)
        return Histogram(name, text, labels, registry=self._prometheus, buckets=series.buckets)


def _child(metric: M, labels: tuple[str, ...]) -> M:
    return metric.labels(*labels) if labels else metric


class _Samples(Collector):
    """Collector that gives prometheus_client samples of the catalogue."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for sample in self._samples:
            series = BY_SAMPLE_NAME[sample.name]
            family = families.get(series.name)
            if family is None:
                name = series.name.removesuffix("_total") if series.kind == "counter" else series.name
                family = families[series.name] = Metric(name, series.help, series.kind)
            labels = dict(zip(label_names(sample.name), sample.labels, strict=True))
            family.add_sample(sample.name, labels, sample.value)
        yield from families.values()


def render(samples: Iterable[Sample]) -> bytes:
    """Return samples in Prometheus's text format."""
    one_time = CollectorRegistry(auto_describe=False)
    one_time.register(_Samples(samples))
    return generate_latest(one_time)


registry = MetricRegistry()  # of this process
