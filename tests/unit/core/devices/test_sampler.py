"""Sampler: one reading a second, of every source that the machine has."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from barnraise.core.devices import BatterySample, DeviceSample, DeviceSampler, MachineSample
from barnraise.core.devices.nvidia import NvidiaCards
from tests.unit.core.devices.test_nvidia import RecordedLibrary

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /sys")


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text + "\n")


def test_second_reading_within_a_second_is_the_first(tmp_path: Path) -> None:
    clock = Clock()
    sampler = DeviceSampler(tmp_path, NvidiaCards(), clock)
    first = sampler.sample()
    clock.now += 0.9
    assert sampler.sample() is first
    clock.now += 0.2
    assert sampler.sample() is not first


@on_linux
def test_power_and_use_are_means_since_the_sample_before(tmp_path: Path) -> None:
    package = "class/powercap/intel-rapl:0/"
    facts = {f"{package}name": "package-0", f"{package}max_energy_range_uj": "100000000"}
    clock = Clock()
    sampler = DeviceSampler(tmp_path, NvidiaCards(), clock)
    write(tmp_path, **facts, **{f"{package}energy_uj": "99000000"})
    first = sampler.sample().devices[0]
    assert (first.utilization, first.power_w) == (None, None)
    assert first.memory_used is not None
    write(tmp_path, **{f"{package}energy_uj": "5000000"})
    clock.now += 2.0
    assert sampler.sample().devices[0].power_w == 3.0


@on_linux
def test_cards_of_two_makers_have_different_names(tmp_path: Path) -> None:
    device = "class/drm/card1/device/"
    write(tmp_path, **{f"{device}vendor": "0x1002", f"{device}gpu_busy_percent": "5"})
    both = DeviceSampler(tmp_path, NvidiaCards(RecordedLibrary())).sample()
    assert [device.name for device in both.devices] == ["cpu", "cuda:0", "cuda:2", "amd:0"]
    assert [device.name for device in DeviceSampler(tmp_path, NvidiaCards()).sample().devices] == [
        "cpu",
        "cuda:0",
    ]


def test_power_of_the_machine_is_that_of_its_battery_or_of_its_devices() -> None:
    devices = tuple(
        DeviceSample(name=f"cuda:{i}", kind="cuda", power_w=power)
        for i, power in enumerate((40.0, None, 2.0))
    )
    assert MachineSample(at=0.0, devices=devices).power_w == 42.0
    assert MachineSample(at=0.0, devices=devices[1:2]).power_w is None
    assert MachineSample(at=0.0, devices=devices, battery=BatterySample(power_w=60.0)).power_w == 60.0


@pytest.mark.parametrize(
    "broken",
    [
        {"name": "cpu", "kind": "cpu", "utilization": 1.5},
        {"name": "cpu", "kind": "CPU"},
        {"name": "", "kind": "cpu"},
        {"name": "cpu", "kind": "cpu", "memory_used": -1},
        {"name": "cpu", "kind": "cpu", "power_w": float("nan")},
    ],
)
def test_sample_of_another_machine_is_bounded(broken: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(broken), type=DeviceSample)
