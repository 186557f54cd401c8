"""NVIDIA cards: each figure that a card lacks is unknown, and a lost card does not hide the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from barnraise.core.devices.nvidia import NvidiaCards
from barnraise.core.devices.sample import DeviceSample


class RecordedLibrary:
    """Answers of NVML for a card, one without power and one that is lost."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.open = False

    def nvmlInit(self) -> None:
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 1:
            raise RuntimeError("GPU is lost")
        return index

    def nvmlDeviceGetName(self, handle: int) -> Any:
        return b"GeForce" if handle == 0 else "Tesla"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=3 << 30, total=8 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=37)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 2:
            raise RuntimeError("Not Supported")
        return 120_500


def test_cards_give_samples() -> None:
    library = RecordedLibrary()
    cards = NvidiaCards(library)
    first, last = cards.samples()
    assert first == DeviceSample(
        name="cuda:0",
        kind="cuda",
        model="GeForce",
        utilization=0.37,
        memory_used=3 << 30,
        memory_total=8 << 30,
        temperature_c=61.0,
        power_w=120.5,
    )
    assert (last.name, last.power_w) == ("cuda:2", None)
    cards.close()
    assert not library.open
    assert cards.samples() == []
