"""Readings of this machine at one moment: memory, temperature, power and load, where they are known.

Of an NVIDIA GPU, ``nvidia-smi`` reports them; otherwise psutil, of the processor.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
from typing import NamedTuple

import psutil

_FIELDS = "memory.used,temperature.gpu,power.draw,utilization.gpu"
_QUERY = ("--query-gpu=" + _FIELDS, "--format=csv,noheader,nounits")
_DEADLINE_S = 5.0
_LARGEST = 65536
_MIB = 1 << 20
_NO_WINDOW: int = getattr(subprocess, "CREATE_NO_WINDOW", 0)
_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")


class Readings(NamedTuple):
    """Measurements of a machine; None: unknown. ``load``: from 0 to 1."""

    used_bytes: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    load: float | None = None


def read_machine() -> Readings:
    """Return the readings of the GPUs, or else of the processor. May take a second; never raises."""
    tool = shutil.which("nvidia-smi")
    gpu = _read_gpus(tool) if tool is not None else None
    return gpu if gpu is not None else _read_processor()


def parse_gpus(text: str) -> Readings | None:
    """Parse the CSV lines of ``nvidia-smi``: sums of memory and power, the highest temperature, mean load."""
    rows = [[_number(field) for field in row] for row in csv.reader(text.splitlines()) if len(row) == 4]
    if not rows:
        return None
    columns = ([value for value in column if value is not None] for column in zip(*rows, strict=True))
    used, temperature, power, load = columns
    return Readings(
        sum(used) * _MIB if used else None,
        max(temperature, default=None),
        sum(power) if power else None,
        min(1.0, sum(load) / len(load) / 100) if load else None,
    )


def _read_gpus(tool: str) -> Readings | None:
    try:
        done = subprocess.run(
            [tool, *_QUERY],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DEADLINE_S,
            creationflags=_NO_WINDOW,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode != 0:
        return None
    return parse_gpus(done.stdout[:_LARGEST].decode("utf-8", "replace"))


def _number(field: str) -> float | None:
    try:
        value = float(field)
    except ValueError:  # [N/A]
        return None
    return value if 0 <= value < 1e9 else None


def _read_processor() -> Readings:
    memory = psutil.virtual_memory()
    return Readings(
        used_bytes=float(memory.total - memory.available),
        temperature_c=_temperature(),
        load=min(1.0, psutil.cpu_percent() / 100),
    )


def _temperature() -> float | None:
    """Return the highest temperature of the processor's sensors."""
    read = getattr(psutil, "sensors_temperatures", None)  # not on Windows and macOS
    try:
        sensors = read() if read is not None else {}
    except (OSError, RuntimeError):
        return None
    values = [entry.current for name in _SENSORS for entry in sensors.get(name, ()) if entry.current > 0]
    return max(values, default=None)
