"""Metrics of all processes: one catalogue of series, and the values that a process counts.

``counter(catalogue.STEPS).inc()`` counts in this process. Workers hand their values to the agent, which shows
all of its machine. Metrics of the host program neither appear here nor collide with ours.
"""

from barnraise.core.metrics.registry import MetricRegistry, registry, render
from barnraise.core.metrics.sample import ProcessValues, Sample
from barnraise.core.metrics.series import Series

counter = registry.counter
gauge = registry.gauge
histogram = registry.histogram

__all__ = [
    "MetricRegistry",
    "ProcessValues",
    "Sample",
    "Series",
    "counter",
    "gauge",
    "histogram",
    "registry",
    "render",
]
