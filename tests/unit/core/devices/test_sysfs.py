"""Figures of Linux: recorded files give samples, and what is missing gives none.

The values of the card and of the processor's energy are those that the tests of prometheus/procfs recorded.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from barnraise.core.devices import sysfs
from barnraise.core.devices.sample import BatterySample, DeviceSample

PACKAGE = {"name": "package-0", "energy_uj": "240422366267", "max_energy_range_uj": "262143328850"}
CORE = {"name": "core", "energy_uj": "118821284256", "max_energy_range_uj": "262143328850"}
RADEON = {
    "vendor": "0x1002",
    "product_name": "",
    "gpu_busy_percent": "4",
    "mem_info_vram_used": "1490378752",
    "mem_info_vram_total": "8573157376",
    "temp1_input": "43000",
    "power1_average": "31000000",
}
BATTERY = {"type": "Battery", "status": "Discharging", "capacity": "81", "power_now": "7503000"}


def test_only_whole_packages_count_and_each_once() -> None:
    counters = sysfs.processor_energy(
        {
            "intel-rapl-mmio:0": {**PACKAGE, "energy_uj": "7"},
            "intel-rapl:0": PACKAGE,
            "intel-rapl:0:0": CORE,
            "intel-rapl:1": {
                "name": "package-1",
                "max_energy_range_uj": "5",
            },  # only root may read its energy
            "intel-rapl:2": {"name": "psys", "energy_uj": "9", "max_energy_range_uj": "10"},
        }
    )
    assert counters == {"package-0": (240422366267, 262143328850)}


@pytest.mark.parametrize(
    ("before", "after", "seconds", "watts"),
    [
        (1_000_000, 21_000_000, 2.0, 10.0),
        (95_000_000, 5_000_000, 1.0, 10.0),  # the counter started again at 100 J
        (5, 5, 1.0, 0.0),
        (5, 9, 0.0, None),
    ],
)
def test_power_is_the_energy_between_two_readings(
    before: int, after: int, seconds: float, watts: float | None
) -> None:
    wrap = 100_000_000
    assert sysfs.mean_power({"p": (before, wrap)}, {"p": (after, wrap)}, seconds) == watts


def test_power_is_unknown_without_an_earlier_reading() -> None:
    assert sysfs.mean_power({}, {"p": (5, 10)}, 1.0) is None
    assert sysfs.mean_power({}, {}, 1.0) is None


def test_amd_card_is_called_cuda_as_torch_does() -> None:
    assert sysfs.graphics_cards({"card0": RADEON, "card0-DP-1": RADEON}) == [
        DeviceSample(
            name="cuda:0",
            kind="cuda",
            utilization=0.04,
            memory_used=1490378752,
            memory_total=8573157376,
            temperature_c=43.0,
            power_w=31.0,
        )
    ]


def test_cards_without_figures_are_no_devices() -> None:
    inside_of_the_processor = {"vendor": "0x8086"}
    nvidia = {"vendor": "0x10de", "temp1_input": "40000"}
    assert sysfs.graphics_cards({"card0": inside_of_the_processor, "card1": nvidia}) == []
    assert sysfs.graphics_cards({"card0": {"vendor": "0x1002", "gpu_busy_percent": "?"}}) == []


def test_cards_are_counted_by_kind_in_the_order_of_the_kernel() -> None:
    arc = {"vendor": "0x8086", "temp1_input": "50000"}
    names = [card.name for card in sysfs.graphics_cards({"card10": RADEON, "card2": RADEON, "card3": arc})]
    assert names == ["cuda:0", "xpu:0", "cuda:1"]


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, None),
        ({"AC": {"type": "Mains"}}, None),
        ({"mouse": {**BATTERY, "scope": "Device"}}, None),
        ({"BAT0": BATTERY}, BatterySample(charge=0.81, discharging=True, power_w=7.503)),
        ({"BAT0": {**BATTERY, "status": "Charging"}}, BatterySample(charge=0.81)),
        (
            {
                "BAT0": {
                    "type": "Battery",
                    "status": "Discharging",
                    "current_now": "-500000",
                    "voltage_now": "12000000",
                }
            },
            BatterySample(discharging=True, power_w=6.0),
        ),
        (
            {"BAT0": BATTERY, "BAT1": {**BATTERY, "capacity": "41"}},
            BatterySample(charge=0.61, discharging=True, power_w=15.006),
        ),
    ],
)
def test_batteries_of_the_machine_itself(
    supplies: dict[str, dict[str, str]], expected: BatterySample | None
) -> None:
    assert sysfs.batteries(supplies) == expected


def test_files_are_read_below_the_folders_that_fit(tmp_path: Path) -> None:
    card = tmp_path / "class/drm/card0/device"
    (card / "hwmon/hwmon3").mkdir(parents=True)
    (card / "vendor").write_text("0x1002\n")
    (card / "hwmon/hwmon3/temp1_input").write_text("43000\n")
    (card / "gpu_busy_percent").mkdir()  # cannot be read as a file
    folders = sysfs.read_folders(tmp_path, sysfs.CARDS)
    assert folders == {"card0": {"vendor": "0x1002", "temp1_input": "43000"}}
