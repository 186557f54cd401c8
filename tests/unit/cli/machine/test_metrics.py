"""``barnraise metrics``: words and units for people, names and numbers for programs."""

from __future__ import annotations

import math

import pytest

from barnraise.cli.machine.metrics import chosen, describe, format_value, short_name, to_json
from barnraise.core.errors import ConfigError
from barnraise.core.metrics import Sample, catalogue

SAMPLES = [
    Sample("barnraise_steps_total", ("spiral", "0"), 1200.0),
    Sample("barnraise_step_seconds_count", ("spiral", "0"), 4.0),
    Sample("barnraise_step_seconds_sum", ("spiral", "0"), 1.0),
    Sample("barnraise_wire_sent_bytes_total", ("spiral", "0"), 3 * 1024.0),
    Sample("barnraise_device_utilization_ratio", ("cuda:0", "GeForce"), 0.42),
    Sample("barnraise_machines", ("online",), 3.0),
]


def test_table_has_words_and_units() -> None:
    lines = [line.split("  ") for line in describe(SAMPLES, 52417).splitlines()]
    cells = [[cell.strip() for cell in line if cell] for line in lines]
    assert ["steps", "spiral, worker 0", "1,200"] in cells
    assert ["step", "spiral, worker 0", "250 ms (mean of 4)"] in cells
    assert ["wire sent", "spiral, worker 0", "3 KiB"] in cells
    assert ["device utilization", "cuda:0, GeForce", "42%"] in cells
    assert "http://127.0.0.1:52417/metrics" in describe(SAMPLES, 52417)
    assert "set metrics.port" in describe(SAMPLES, 0)


def test_nothing_counted_is_said() -> None:
    assert describe([], 0, "loss") == "loss: nothing has been counted yet."


@pytest.mark.parametrize("name", ["step phase", "step_phase", "barnraise_step_phase_seconds_total", "PHASE"])
def test_series_are_chosen_by_a_part_of_their_name(name: str) -> None:
    assert catalogue.PHASE_TIME in chosen(name)
    assert catalogue.LOSS not in chosen(name)


def test_short_names_differ() -> None:
    names = [short_name(series) for series in catalogue.CATALOGUE]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("value", "series", "expected"),
    [
        (0.5, catalogue.LOSS, "0.5"),
        (math.nan, catalogue.LOSS, "nan"),
        (math.inf, catalogue.LOSS, "inf"),
        (61.4, catalogue.DEVICE_TEMPERATURE, "61 °C"),
        (310.52, catalogue.DEVICE_POWER, "310.5 W"),
        (3, catalogue.RUNS, "3"),
    ],
)
def test_values_have_their_units(value: float, series: catalogue.Series, expected: str) -> None:
    assert format_value(value, series) == expected


def test_json_has_no_numbers_that_json_lacks() -> None:
    metrics = to_json([Sample("barnraise_loss", ("spiral", "0"), math.nan)])["metrics"]
    assert metrics == [
        {"name": "barnraise_loss", "labels": {"run": "spiral", "worker": "0"}, "value": None, "unit": ""}
    ]


def test_unknown_name_is_an_error() -> None:
    from barnraise.cli.machine import metrics

    with pytest.raises(ConfigError, match="no metric 'nonsense'"):
        metrics.run("nonsense", watch=False, as_json=False)
