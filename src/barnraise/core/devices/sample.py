"""Samples of a machine's devices: what each one did and held at one moment. Pure.

The types are bounded, because other machines may send them, too.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

Kind = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,15}\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Model = Annotated[str, Meta(max_length=128)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
Celsius = Annotated[float, Meta(ge=-273.15, le=1000)]
Watts = Annotated[float, Meta(ge=0, le=1e6)]


class DeviceSample(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one processor or accelerator at one moment. None: this machine cannot tell.

    ``name``: as torch counts devices (``cpu``, ``cuda:0``). ``kind``: torch's word, without the number.
    ``utilization``: 0 to 1, of all cores together. ``memory_used``: of all programs, in bytes.
    """

    name: Name
    kind: Kind
    model: Model = ""
    utilization: Ratio | None = None
    memory_used: Bytes | None = None
    memory_total: Bytes | None = None
    temperature_c: Celsius | None = None
    power_w: Watts | None = None

    def __post_init__(self) -> None:
        for figure in (self.utilization, self.temperature_c, self.power_w):
            if figure is not None and not math.isfinite(figure):
                raise ValueError("a figure is not a finite number")


class BatterySample(msgspec.Struct, frozen=True, kw_only=True):
    """Charge of the machine's batteries together. ``power_w``: what they give; None while they charge."""

    charge: Ratio | None = None
    discharging: bool = False
    power_w: Watts | None = None


class MachineReading(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of all devices of a machine at one moment; ``at``: seconds since 1970."""

    at: Annotated[float, Meta(ge=0, le=1e12)]
    devices: Annotated[tuple[DeviceSample, ...], Meta(max_length=64)] = ()
    battery: BatterySample | None = None

    @property
    def computing(self) -> tuple[DeviceSample, ...]:
        """Return the devices that train: the accelerators, or the processor if there is none."""
        accelerators = tuple(device for device in self.devices if device.kind != "cpu")
        return accelerators or self.devices

    @property
    def power_w(self) -> float | None:
        """Return the power of all devices that tell theirs; None if none does.

        A battery tells the power of the whole machine, so its figure comes first.
        """
        if self.battery is not None and self.battery.power_w is not None:
            return self.battery.power_w
        powers = [device.power_w for device in self.devices if device.power_w is not None]
        return sum(powers) if powers else None
