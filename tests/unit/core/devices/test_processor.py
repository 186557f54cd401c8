"""Processor: its use is a difference of times, and its temperature that of the whole package."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from barnraise.core.devices.processor import CpuTimes, cpu_temperature, cpu_times, utilization


def readings(*values: tuple[str, float]) -> list[SimpleNamespace]:
    return [SimpleNamespace(label=label, current=current) for label, current in values]


@pytest.mark.parametrize(
    ("after", "expected"), [((130.0, 440.0), 0.75), ((100.0, 400.0), None), ((90.0, 420.0), 0.0)]
)
def test_utilization_is_work_over_time(after: tuple[float, float], expected: float | None) -> None:
    assert utilization(CpuTimes(100.0, 400.0), CpuTimes(*after)) == expected


def test_this_machine_works() -> None:
    before = cpu_times()
    while cpu_times().total - before.total < 0.05:
        sum(range(10_000))
    used = utilization(before, cpu_times())
    assert used is not None
    assert used > 0


@pytest.mark.parametrize(
    ("sensors", "expected"),
    [
        ({}, None),
        ({"nvme": readings(("Composite", 33.0))}, None),
        (
            {"coretemp": readings(("Package id 0", 50.0), ("Core 0", 52.0)), "acpitz": readings(("", 27.8))},
            50.0,
        ),
        ({"coretemp": readings(("Package id 0", 50.0), ("Package id 1", 58.0))}, 58.0),
        ({"k10temp": readings(("Tctl", 61.4), ("Tccd1", 55.0))}, 61.4),
        ({"cpu_thermal": readings(("", 44.3))}, 44.3),
        ({"acpitz": readings(("", -263.2))}, None),  # a board without this sensor
    ],
)
def test_temperature_is_that_of_the_package(
    sensors: dict[str, list[SimpleNamespace]], expected: float | None
) -> None:
    assert cpu_temperature(sensors) == expected
