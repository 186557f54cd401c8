"""The catalogue of metrics and docs/metrics.md are equal, and names follow Prometheus's rules."""

from __future__ import annotations

import re

from barnraise.core.metrics.catalogue import BY_SAMPLE_NAME, CATALOGUE
from barnraise.core.metrics.series import Series
from tests.arch.source_tree import ROOT

_ROW = re.compile(r"^\| `(barnraise_\w+)` \| (\w+) \| (\S+) \| (.+?) \| (.+) \|$", re.MULTILINE)
_ENDINGS = {"bytes": "_bytes", "seconds": "_seconds", "time": "_time_seconds", "ratio": "_ratio"}


def _row(series: Series) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in series.labels) or "-"
    return series.name, series.kind, series.unit or "-", labels, series.help


def test_documentation_has_exactly_the_series_of_the_catalogue() -> None:
    documented = _ROW.findall((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    assert sorted(documented) == sorted(map(_row, CATALOGUE))


def test_names_follow_the_rules_of_prometheus() -> None:
    for series in CATALOGUE:
        assert re.fullmatch(r"barnraise_[a-z0-9_]+[a-z]", series.name)
        assert series.name.endswith("_total") == (series.kind == "counter"), series.name
        assert _ENDINGS.get(series.unit, "") in series.name, series.name
        assert bool(series.buckets) == (series.kind == "histogram"), series.name
        assert series.help.endswith("."), series.name
        assert not {"le", "instance", "job"} & set(series.labels), series.name


def test_no_two_series_share_a_sample() -> None:
    assert sum(len(series.sample_names) for series in CATALOGUE) == len(BY_SAMPLE_NAME)
