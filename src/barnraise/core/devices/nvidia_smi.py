"""Figures of NVIDIA cards by the command line tool of their driver, where nvidia-ml-py is not installed."""

from __future__ import annotations

import csv
import shutil
import subprocess

from barnraise.core.devices.sample import DeviceSample

_FIELDS = ("index", "name", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "power.draw")
_QUERY = (f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
_DEADLINE_S = 5.0
_LARGEST = 65536
_MIB = 1 << 20
_NO_WINDOW: int = getattr(subprocess, "CREATE_NO_WINDOW", 0)


def read_cards() -> list[DeviceSample]:
    """Return one sample for each card. May take a second; never raises."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
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
        return []
    return parse_cards(done.stdout[:_LARGEST].decode("utf-8", "replace")) if done.returncode == 0 else []


def parse_cards(text: str) -> list[DeviceSample]:
    """Parse the lines of the tool; a figure that a card lacks is ``[N/A]``. Pure."""
    cards = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(_FIELDS) or not (row[0].isascii() and row[0].isdigit()):
            continue
        use, used, total, heat, power = map(_number, row[2:])
        cards.append(
            DeviceSample(
                name=f"cuda:{int(row[0])}",
                kind="cuda",
                model=row[1][:128],
                utilization=None if use is None else min(1.0, use / 100),
                memory_used=None if used is None else int(used) * _MIB,
                memory_total=None if total is None else int(total) * _MIB,
                temperature_c=heat,
                power_w=power,
            )
        )
    return cards[:32]


def _number(field: str) -> float | None:
    try:
        value = float(field)
    except ValueError:
        return None
    return value if 0 <= value < 1e6 else None
