"""Sampler of all devices of this machine: asks each source, at most once a second."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from barnraise.core.devices import sysfs
from barnraise.core.devices.nvidia import NvidiaCards
from barnraise.core.devices.processor import CpuTimes, cpu_temperature, cpu_times, temperatures, utilization
from barnraise.core.devices.sample import BatterySample, DeviceSample, MachineReading

_SYS = Path("/sys")
MIN_INTERVAL_S = 1.0


class DeviceSampler:
    """Samples of this machine's devices. Safe in several threads; a sample takes a few milliseconds.

    Use and power of the processor are means since the sample before, so the first sample has neither.
    """

    def __init__(
        self,
        root: Path = _SYS,
        nvidia: NvidiaCards | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._monotonic = root, monotonic
        self._nvidia = NvidiaCards() if nvidia is None else nvidia
        self._lock = threading.Lock()
        self._last: MachineReading | None = None
        self._last_at = float("-inf")
        self._times: CpuTimes | None = None
        self._energy: dict[str, tuple[int, int]] = {}

    def sample(self) -> MachineReading:
        """Return the figures of now, or those of less than a second ago."""
        with self._lock:
            now = self._monotonic()
            if self._last is None or now - self._last_at >= MIN_INTERVAL_S:
                self._last = self._read(now)
                self._last_at = now
            return self._last

    def close(self) -> None:
        """Close all sources of figures."""
        with self._lock:
            self._nvidia.close()

    def _read(self, now: float) -> MachineReading:
        cards = self._nvidia.samples()
        on_linux = sys.platform == "linux"
        if on_linux:
            others = sysfs.graphics_cards(sysfs.read_folders(self._root, sysfs.CARDS))
            # torch is built for one maker's cards: beside NVIDIA's, AMD's have a name of their own.
            cards += [_renamed(card) if cards and card.kind == "cuda" else card for card in others]
        return MachineReading(
            at=time.time(),
            devices=(self._processor(now, on_linux), *cards[:63]),
            battery=self._battery(on_linux),
        )

    def _processor(self, now: float, on_linux: bool) -> DeviceSample:
        times = cpu_times()
        used = utilization(self._times, times) if self._times is not None else None
        self._times = times
        power = None
        if on_linux:
            energy = sysfs.processor_energy(sysfs.read_folders(self._root, sysfs.POWERCAP))
            power = sysfs.mean_power(self._energy, energy, now - self._last_at)
            self._energy = energy
        memory = psutil.virtual_memory()
        return DeviceSample(
            name="cpu",
            kind="cpu",
            utilization=used,
            memory_used=int(memory.total - memory.available),
            memory_total=int(memory.total),
            temperature_c=cpu_temperature(temperatures()),
            power_w=power,
        )

    def _battery(self, on_linux: bool) -> BatterySample | None:
        if on_linux:  # psutil takes the battery of a wireless mouse for ours
            return sysfs.batteries(sysfs.read_folders(self._root, sysfs.SUPPLIES))
        try:
            battery = psutil.sensors_battery()
        except Exception:  # noqa: BLE001 - damaged drivers raise anything
            return None
        if battery is None:
            return None
        charge = min(1.0, max(0.0, battery.percent / 100))
        return BatterySample(charge=charge, discharging=battery.power_plugged is False)


def _renamed(card: DeviceSample) -> DeviceSample:
    return msgspec.structs.replace(card, name=card.name.replace("cuda", "amd"), kind="amd")
