"""``barnraise metrics``: what this machine and its runs count, in words with units."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import click

from barnraise.agent_client.metrics.requests import MetricsRequest, MetricsResponse
from barnraise.cli.agent_call import ask
from barnraise.cli.tables import table
from barnraise.core.errors import ConfigError
from barnraise.core.metrics import Sample, Series
from barnraise.core.metrics.catalogue import BY_SAMPLE_NAME, CATALOGUE
from barnraise.core.metrics.sample import label_names
from barnraise.core.units import format_duration, format_size

WATCH_S = 2.0
_PREFIX = "barnraise_"
_SUFFIXES = ("_total", "_bytes", "_seconds", "_ratio", "_celsius", "_watts")


def run(name: str, *, watch: bool, as_json: bool) -> int:
    """Print the metrics whose name contains ``name``; with ``watch`` again and again."""
    if not chosen(name):
        raise ConfigError(f"there is no metric {name!r}", hint="List all: barnraise metrics")
    while True:
        answer = ask(MetricsRequest(), MetricsResponse)
        samples = [sample for sample in answer.samples if BY_SAMPLE_NAME[sample.name] in chosen(name)]
        if watch and not as_json:
            click.clear()
        click.echo(json.dumps(to_json(samples)) if as_json else describe(samples, answer.port, name))
        if not watch:
            return 0
        time.sleep(WATCH_S)


def chosen(name: str) -> tuple[Series, ...]:
    """Return the series whose name contains this text, as Prometheus or as this command writes it. Pure."""
    wanted = name.lower().replace(" ", "_")
    return tuple(series for series in CATALOGUE if wanted in series.name)


def describe(samples: Sequence[Sample], port: int, name: str = "") -> str:
    """Format samples as a table. Pure."""
    if not samples:
        return f"{name}: nothing has been counted yet." if name else "Nothing has been counted yet."
    rows = [("METRIC", "OF", "VALUE")]
    rows += [(short_name(series), labels, value) for series, labels, value in _lines(samples)]
    served = f"Prometheus reads all of them at http://127.0.0.1:{port}/metrics"
    closed = "For Prometheus, set metrics.port (docs/metrics.md)."
    return f"{table(rows, words=(1,))}\n\n{served if port else closed}"


def to_json(samples: Iterable[Sample]) -> dict[str, object]:
    """Return samples as one object: names, labels and numbers as Prometheus has them. Pure."""
    return {
        "metrics": [
            {
                "name": sample.name,
                "labels": dict(zip(label_names(sample.name), sample.labels, strict=True)),
                "value": sample.value if abs(sample.value) < float("inf") else None,
                "unit": BY_SAMPLE_NAME[sample.name].unit,
            }
            for sample in samples
        ]
    }


def short_name(series: Series) -> str:
    """Return the name in words, without the prefix and the unit."""
    name = series.name.removeprefix(_PREFIX)
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    for suffix in _SUFFIXES:  # such as _bytes_total
        name = name.removesuffix(suffix)
    return name.replace("_", " ")


def format_value(value: float, series: Series) -> str:
    """Return a number with its unit."""
    match series.unit:
        case "bytes":
            return format_size(value)
        case "seconds":
            return format_duration(value)
        case "ratio":
            return f"{value:.0%}"
        case "celsius":
            return f"{value:.0f} °C"
        case "watts":
            return f"{value:.1f} W"
        case "time":
            return datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M:%S")
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def _lines(samples: Iterable[Sample]) -> list[tuple[Series, str, str]]:
    """Return one line for each series and its labels; of a histogram the mean and the count."""
    values: dict[tuple[str, tuple[str, ...]], dict[str, float]] = {}
    for sample in samples:
        series = BY_SAMPLE_NAME[sample.name]
        part = sample.name.removeprefix(series.name)
        values.setdefault((series.name, sample.labels), {})[part] = sample.value
    order = {series.name: place for place, series in enumerate(CATALOGUE)}
    lines = []
    for (name, labels), parts in sorted(values.items(), key=lambda item: (order[item[0][0]], item[0][1])):
        series = next(series for series in CATALOGUE if series.name == name)
        lines.append((series, _labels(series, labels), _value(series, parts)))
    return lines


def _value(series: Series, parts: Mapping[str, float]) -> str:
    if series.kind != "histogram":
        return format_value(parts[""], series)
    count = parts.get("_count", 0.0)
    mean = parts.get("_sum", 0.0) / count if count else 0.0
    return f"{format_value(mean, series)} (mean of {count:,.0f})"


def _labels(series: Series, labels: Sequence[str]) -> str:
    named = dict(zip(series.labels, labels, strict=True))
    if "worker" in named:
        named["worker"] = f"worker {named['worker']}"
    return ", ".join(value for value in named.values() if value)
