"""Battery: only a machine without mains power counts, and no battery of a mouse."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from barnraise.core.host.battery import is_on_battery

MAINS = {"type": "Mains", "online": "1"}
UNPLUGGED = {"type": "Mains", "online": "0"}
DRAINED = {"type": "Battery", "status": "Discharging"}
CHARGED = {"type": "Battery", "status": "Full"}
MOUSE = {"type": "Battery", "status": "Discharging", "scope": "Device"}


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, False),
        ({"BAT0": DRAINED}, True),
        ({"BAT0": DRAINED, "AC": UNPLUGGED}, True),
        ({"BAT0": DRAINED, "AC": MAINS}, False),  # a weak charger
        ({"BAT0": CHARGED, "AC": MAINS}, False),
        ({"BAT0": DRAINED, "ucsi": {"type": "USB", "online": "1"}}, False),
        ({"hidpp_battery_0": MOUSE}, False),
        ({"hidpp_battery_0": MOUSE, "BAT0": DRAINED}, True),
        ({"BAT0": {}}, False),
    ],
)
def test_linux_counts_batteries_of_the_machine_itself(
    tmp_path: Path, supplies: dict[str, dict[str, str]], expected: bool
) -> None:
    for name, facts in supplies.items():
        (tmp_path / name).mkdir()
        for fact, value in facts.items():
            (tmp_path / name / fact).write_text(value + "\n")
    assert is_on_battery("linux", tmp_path) is expected


def test_linux_without_the_kernels_files_has_mains(tmp_path: Path) -> None:
    assert not is_on_battery("linux", tmp_path / "missing")


@pytest.mark.parametrize(
    ("plugged", "expected"), [(True, False), (False, True), (None, False), ("none", False), ("raises", False)]
)
def test_other_systems_are_asked_through_psutil(
    monkeypatch: pytest.MonkeyPatch, plugged: object, expected: bool
) -> None:
    def ask() -> object:
        if plugged == "raises":
            raise ValueError("a driver's nonsense")
        return None if plugged == "none" else SimpleNamespace(percent=50, power_plugged=plugged)

    monkeypatch.setattr(psutil, "sensors_battery", ask, raising=False)
    assert is_on_battery("darwin") is expected
