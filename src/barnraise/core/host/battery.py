"""Battery: whether this machine runs on it."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

_SUPPLIES = Path("/sys/class/power_supply")


def is_on_battery(platform: str = sys.platform, supplies: Path = _SUPPLIES) -> bool:
    """Return True if the machine has a battery and no mains power. A system that cannot tell has mains."""
    if platform == "linux":
        return _discharges(supplies)
    try:
        battery = psutil.sensors_battery()
    except Exception:  # noqa: BLE001  # damaged drivers raise anything
        return False
    return battery is not None and battery.power_plugged is False


def _discharges(supplies: Path) -> bool:
    """Read what Linux says of its power supplies. psutil takes the battery of a wireless mouse for ours."""
    try:
        folders = [folder for folder in supplies.iterdir() if _fact(folder, "scope") != "Device"]
    except OSError:
        return False
    is_plugged = any(_fact(each, "type") != "Battery" and _fact(each, "online") == "1" for each in folders)
    batteries = [each for each in folders if _fact(each, "type") == "Battery"]
    return not is_plugged and any(_fact(each, "status") == "Discharging" for each in batteries)


def _fact(supply: Path, name: str) -> str:
    try:
        return (supply / name).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
