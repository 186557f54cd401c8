"""Hardware of a machine and its measured speed. Pure.

These values come from other machines, too: every text and list is bounded, and numbers are finite.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.sanitize import printable

Kind = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,15}\Z")]  # torch's name: cpu, cuda, mps, xpu ...
Word = Annotated[str, Meta(max_length=128)]
Note = Annotated[str, Meta(max_length=400)]
Notes = Annotated[tuple[Note, ...], Meta(max_length=32)]
Count = Annotated[int, Meta(ge=0, le=1 << 20)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
Figure = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1e9)]

# Of the CPU: more than this was used by others, or taken away by the host of a virtual machine.
BUSY_SHARE = 0.15
STOLEN_SHARE = 0.02
# Of the median: a larger distance between the quartiles makes a figure doubtful.
WIDE_SPREAD = 0.25


class Device(msgspec.Struct, frozen=True):
    """Processor or accelerator of a machine. 0 bytes: not known; None: not measured."""

    kind: Kind
    index: Annotated[int, Meta(ge=0, le=255)]
    name: Word
    memory_bytes: Bytes
    tflops_fp32: Figure | None = None
    memory_gbps: Figure | None = None
    usable: bool = True  # False: the installed torch does not know it

    def __post_init__(self) -> None:
        require_finite(self.tflops_fp32, self.memory_gbps)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware, system and load of a machine as it is now."""

    os: Word
    os_version: Word
    arch: Word
    cpu_name: Word
    cores: Count
    memory_bytes: Bytes
    python: Word
    torch: Word | None
    barnraise: Word
    devices: Annotated[tuple[Device, ...], Meta(max_length=64)] = ()
    notes: Notes = ()

    @property
    def torch_devices(self) -> tuple[str, ...]:
        """Return the names that torch uses; the CPU only if there is no accelerator that it can use."""
        names = [
            device.kind if device.kind == "mps" else f"{device.kind}:{device.index}"
            for device in self.devices
            if device.kind != "cpu" and device.usable
        ]
        return tuple(names) or ("cpu",)


def decode_machine(data: bytes) -> Machine | None:
    """Decode what another machine says about itself; None if it is malformed. Texts can be shown as they are.

    A name that a terminal cannot show says nothing about hardware, so its characters are replaced.
    """
    try:
        machine = msgspec.msgpack.decode(data, type=Machine)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return msgspec.structs.replace(
        machine,
        os=printable(machine.os),
        os_version=printable(machine.os_version),
        arch=printable(machine.arch),
        cpu_name=printable(machine.cpu_name),
        python=printable(machine.python),
        torch=None if machine.torch is None else printable(machine.torch),
        barnraise=printable(machine.barnraise),
        devices=tuple(
            msgspec.structs.replace(device, name=printable(device.name)) for device in machine.devices
        ),
        notes=tuple(map(printable, machine.notes)),
    )


class DeviceSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Probe result of one device. The spread is the distance of the quartiles over the median."""

    kind: Kind
    index: Annotated[int, Meta(ge=0, le=255)]
    name: Word
    memory_bytes: Bytes
    tflops_fp32: Figure | None = None
    memory_gbps: Figure | None = None
    spread: Share = 0.0

    def __post_init__(self) -> None:
        require_finite(self.tflops_fp32, self.memory_gbps, self.spread)


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one or several runs of the probe, and what disturbed them."""

    torch: Word | None = None
    # Accelerators that torch knows; None: not asked, by an earlier version.
    accelerators: Annotated[tuple[tuple[Kind, Count], ...], Meta(max_length=64)] | None = None
    speeds: Annotated[tuple[DeviceSpeed, ...], Meta(max_length=64)] = ()
    busy: Share = 0.0
    stolen: Share = 0.0
    tries: Count = 1
    notes: Notes = ()

    @property
    def disturbed(self) -> bool:
        """Return True if another run may give better figures."""
        wide = any(speed.spread > WIDE_SPREAD for speed in self.speeds)
        return wide or self.busy > BUSY_SHARE or self.stolen > STOLEN_SHARE


def honest_notes(report: ProbeReport) -> tuple[str, ...]:
    """Return what a reader of the figures must know."""
    notes = []
    if report.busy > BUSY_SHARE:
        notes.append(f"the machine was busy when its speed was measured ({report.busy:.0%} of the CPU)")
    if report.stolen > STOLEN_SHARE:
        notes.append(f"the host took {report.stolen:.0%} of the CPU away while the speed was measured")
    for speed in report.speeds:
        if speed.spread > WIDE_SPREAD:
            name = f"{speed.kind}:{speed.index}"
            notes.append(f"the speed of {name} varies: repeats differ by {speed.spread:.0%} of the median")
    return tuple(notes)


def with_speeds(machine: Machine, report: ProbeReport | None) -> Machine:
    """Return the machine with measured speeds, devices that only the probe can see, and notes."""
    if report is None:
        return machine
    measured = {(speed.kind, speed.index): speed for speed in report.speeds}
    devices, unusable = [], []
    for device in machine.devices:
        speed = measured.pop((device.kind, device.index), None)
        if not _is_known(device, report):
            device = msgspec.structs.replace(device, usable=False)
            unusable.append(f"torch {report.torch} cannot use {device.name} ({device.kind}:{device.index})")
        elif speed is not None:
            device = Device(
                device.kind,
                device.index,
                speed.name or device.name,
                # torch may count cards in another order than their driver does: its word goes together.
                speed.memory_bytes if speed.name else device.memory_bytes,
                speed.tflops_fp32,
                speed.memory_gbps,
            )
        devices.append(device)
    for speed in measured.values():
        devices.append(
            Device(
                speed.kind,
                speed.index,
                speed.name,
                speed.memory_bytes,
                speed.tflops_fp32,
                speed.memory_gbps,
            )
        )
    notes = dict.fromkeys((*machine.notes, *unusable, *report.notes, *honest_notes(report)))
    return msgspec.structs.replace(machine, devices=tuple(devices), notes=tuple(notes)[:32])


def _is_known(device: Device, report: ProbeReport) -> bool:
    """Tell whether torch can use a device that the system lists."""
    if device.kind == "cpu" or report.torch is None or report.accelerators is None:
        return True
    return (device.kind, device.index) in report.accelerators


def best_of(old: ProbeReport | None, new: ProbeReport) -> ProbeReport:
    """Merge two probe reports: a disturbance only slows, so the higher figure is closer to the truth."""
    if old is None:
        return new
    earlier = {(speed.kind, speed.index): speed for speed in old.speeds}
    speeds = []
    for speed in new.speeds:
        other = earlier.get((speed.kind, speed.index), speed)
        faster = speed if (speed.tflops_fp32 or 0) >= (other.tflops_fp32 or 0) else other
        bandwidths = [each.memory_gbps for each in (speed, other) if each.memory_gbps is not None]
        speeds.append(msgspec.structs.replace(faster, memory_gbps=max(bandwidths, default=None)))
    quieter = new if not new.disturbed else min(new, old, key=lambda each: (each.busy, each.stolen))
    return msgspec.structs.replace(
        new, speeds=tuple(speeds), tries=old.tries + new.tries, busy=quieter.busy, stolen=quieter.stolen
    )


def require_finite(*figures: float | None) -> None:
    """Raise ValueError for NaN and infinity, which bounds do not reject."""
    for figure in figures:
        if figure is not None and not math.isfinite(figure):
            raise ValueError("a figure is not a finite number")
