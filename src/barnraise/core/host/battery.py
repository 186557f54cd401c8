"""Battery: whether this machine runs on it."""

from __future__ import annotations

import psutil


def is_on_battery() -> bool:
    """Return True if the machine has a battery and no mains power. A system that cannot tell has mains."""
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError, psutil.Error):  # no such call, or damaged drivers
        return False
    return battery is not None and battery.power_plugged is False
