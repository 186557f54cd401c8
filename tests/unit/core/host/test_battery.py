"""Battery: only a machine without mains power counts."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from barnraise.core.host.battery import is_on_battery


@pytest.mark.parametrize(
    ("plugged", "expected"), [(True, False), (False, True), (None, False), ("none", False), ("raises", False)]
)
def test_battery_counts_only_without_mains(
    monkeypatch: pytest.MonkeyPatch, plugged: object, expected: bool
) -> None:
    def ask() -> object:
        if plugged == "raises":
            raise FileNotFoundError("/sys/class/power_supply/BAT0/capacity")
        return None if plugged == "none" else SimpleNamespace(percent=50, power_plugged=plugged)

    monkeypatch.setattr(psutil, "sensors_battery", ask, raising=False)
    assert is_on_battery() is expected
