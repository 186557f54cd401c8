"""Figures of NVIDIA cards, by the driver's library (NVML), or by its command line tool.

The package nvidia-ml-py, which calls the library, is optional.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from barnraise.core.devices import nvidia_smi
from barnraise.core.devices.sample import DeviceSample

_MAX_CARDS = 32


class NvidiaCards:
    """The NVIDIA cards of this machine; the library stays open until ``close``."""

    def __init__(self, library: Any | None = None) -> None:
        self._closed = False
        self._nvml: Any | None = library if library is not None else _library()
        if self._nvml is not None:
            try:
                self._nvml.nvmlInit()
            except Exception:  # noqa: BLE001 - the library raises its own errors where there is no driver
                self._nvml = None

    def samples(self) -> list[DeviceSample]:
        """Return one sample for each card that answers."""
        if self._closed:
            return []
        if self._nvml is None:
            return nvidia_smi.read_cards()
        cards = []
        try:
            count = min(_MAX_CARDS, int(self._nvml.nvmlDeviceGetCount()))
        except Exception:  # noqa: BLE001 - the driver was unloaded
            return []
        for index in range(count):
            with contextlib.suppress(Exception):  # a card that fell off the bus must not hide the others
                cards.append(card_sample(self._nvml, index))
        return cards

    def close(self) -> None:
        """Close the library, so that the cards may sleep."""
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
        self._nvml, self._closed = None, True


def card_sample(nvml: Any, index: int) -> DeviceSample:
    """Return the figures of one card; a card may lack any of them."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = _asked(lambda: nvml.nvmlDeviceGetName(handle))
    memory = _asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    rates = _asked(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    heat = _asked(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    power = _asked(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    model = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name or "")
    return DeviceSample(
        name=f"cuda:{index}",
        kind="cuda",
        model=model[:128],
        utilization=None if rates is None else min(1.0, rates.gpu / 100),
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
        temperature_c=None if heat is None else float(heat),
        power_w=None if power is None else power / 1000,
    )


def _library() -> Any | None:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _asked(question: Any) -> Any | None:
    try:
        return question()
    except Exception:  # noqa: BLE001 - "not supported" is an error of the library's own
        return None
