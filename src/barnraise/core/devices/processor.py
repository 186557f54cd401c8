"""Figures of the processor and the main memory, as psutil tells them on every system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import psutil

# hwmon's names of sensors in processors: Intel, AMD, and the boards of ARM.
_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "acpitz")
# The one figure of the whole processor; the others are parts of it.
_WHOLE = ("package", "tctl", "tdie")


class Reading(Protocol):
    """One temperature of ``psutil.sensors_temperatures``."""

    label: str
    current: float


class CpuTimes(NamedTuple):
    """Seconds that the cores worked, and all seconds, since the system started."""

    busy: float
    total: float


def cpu_times() -> CpuTimes:
    """Return the times of all cores together. Waiting for a disk is no work."""
    times = psutil.cpu_times()._asdict()
    # Linux counts the time of guests in the user's time, too.
    total = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
    return CpuTimes(total - times["idle"] - times.get("iowait", 0.0), total)


def utilization(before: CpuTimes, after: CpuTimes) -> float | None:
    """Return the part of the cores' time that was work, from 0 to 1; None if no time has passed."""
    passed = after.total - before.total
    if passed <= 0:
        return None
    return min(1.0, max(0.0, (after.busy - before.busy) / passed))


def cpu_temperature(sensors: Mapping[str, Sequence[Reading]]) -> float | None:
    """Return the temperature of the processor: the highest of its packages; None if no sensor tells it."""
    for sensor in _SENSORS:
        readings = sensors.get(sensor, ())
        whole = [each.current for each in readings if each.label.lower().startswith(_WHOLE)]
        all_of_them = [each.current for each in readings]
        plausible = [value for value in whole or all_of_them if -50 < value < 150]
        if plausible:
            return float(max(plausible))
    return None


def temperatures() -> Mapping[str, Sequence[Reading]]:
    """Return what the sensors tell; empty on systems where psutil has none."""
    try:
        sensors: Mapping[str, Sequence[Reading]] = psutil.sensors_temperatures()
    except Exception:  # noqa: BLE001 - macOS and Windows lack the function, and damaged drivers raise anything
        return {}
    return sensors
