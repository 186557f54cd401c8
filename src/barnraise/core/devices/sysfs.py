"""Figures that Linux shows below /sys: energy of processors, graphics cards and batteries. Pure but for one.

``read_folders`` reads; the parsers get its result, so tests give them recorded files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from barnraise.core.devices.sample import BatterySample, DeviceSample

Folders = Mapping[str, Mapping[str, str]]  # the texts of each folder's files

POWERCAP = ("class/powercap/*:*", ("name", "energy_uj", "max_energy_range_uj"))
CARDS = (
    "class/drm/card[0-9]*",
    (
        "device/vendor",
        "device/product_name",
        "device/gpu_busy_percent",
        "device/mem_info_vram_used",
        "device/mem_info_vram_total",
        "device/hwmon/hwmon*/temp1_input",
        "device/hwmon/hwmon*/power1_average",
        "device/hwmon/hwmon*/power1_input",
    ),
)
SUPPLIES = (
    "class/power_supply/*",
    (
        *("type", "scope", "status", "capacity"),
        *("power_now", "current_now", "voltage_now"),
    ),
)
_AMD, _INTEL = "0x1002", "0x8086"
_LONGEST_TEXT = 256


def read_folders(root: Path, source: tuple[str, Iterable[str]]) -> dict[str, dict[str, str]]:
    """Return the files of each folder that fits the pattern; what cannot be read is left out.

    A pattern of a file may have a part that varies, such as hwmon3; its last name is the key then.
    """
    pattern, files = source
    folders = {}
    for folder in sorted(root.glob(pattern)):
        texts = {}
        for file in files:
            places = folder.glob(file) if "*" in file else (folder / file,)
            for place in places:
                text = _text(place)
                if text is not None:
                    texts[place.name] = text
        folders[folder.name] = texts
    return folders


def _text(place: Path) -> str | None:
    try:
        with place.open("rb") as file:
            return file.read(_LONGEST_TEXT).decode("utf-8", "replace").strip()
    except OSError:  # no such figure, a sleeping card, or only root may read it
        return None


def processor_energy(powercap: Folders) -> dict[str, tuple[int, int]]:
    """Return the energy counter of each processor package, and where it starts again, in microjoules.

    Only whole packages count: their parts would be counted twice. The kernel may list a package a second
    time, read by memory-mapped registers; the first one counts.
    """
    counters: dict[str, tuple[int, int]] = {}
    for folder in sorted(powercap, key=lambda name: ("mmio" in name, name)):
        files = powercap[folder]
        energy, wrap = _number(files, "energy_uj"), _number(files, "max_energy_range_uj")
        if files.get("name", "").startswith("package-") and energy is not None and wrap is not None:
            counters.setdefault(files["name"], (energy, wrap))
    return counters


def mean_power(
    before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]], seconds: float
) -> float | None:
    """Return the mean power of all packages between two readings, in watts; None if it is unknown."""
    if seconds <= 0 or not after or before.keys() != after.keys():
        return None
    spent = 0
    for package, (energy, wrap) in after.items():
        difference = energy - before[package][0]
        spent += difference if difference >= 0 else difference + wrap
    return spent / 1e6 / seconds if spent >= 0 else None


def graphics_cards(cards: Folders) -> list[DeviceSample]:
    """Return the AMD and Intel cards that tell at least one figure; NVIDIA's have their own source.

    torch calls AMD's cards ``cuda`` and Intel's ``xpu``, and counts each kind from 0.
    """
    samples: list[DeviceSample] = []
    counts = {"cuda": 0, "xpu": 0}
    for folder in sorted(cards, key=lambda name: (len(name), name)):
        files = cards[folder]
        kind = {_AMD: "cuda", _INTEL: "xpu"}.get(files.get("vendor", ""))
        if kind is None or "-" in folder:  # card0-DP-1 is a connector
            continue
        busy = _number(files, "gpu_busy_percent")
        heat = _number(files, "temp1_input")
        power = _number(files, "power1_average", "power1_input")
        used, total = _number(files, "mem_info_vram_used"), _number(files, "mem_info_vram_total")
        if busy is heat is power is total is None:
            continue  # an Intel card inside of the processor tells nothing here
        samples.append(
            DeviceSample(
                name=f"{kind}:{counts[kind]}",
                kind=kind,
                model=files.get("product_name", "")[:128],
                utilization=None if busy is None else min(1.0, busy / 100),
                memory_used=used,
                memory_total=total,
                temperature_c=None if heat is None else heat / 1000,
                power_w=None if power is None else power / 1e6,
            )
        )
        counts[kind] += 1
    return samples


def batteries(supplies: Folders) -> BatterySample | None:
    """Return the charge and the power of the machine's own batteries; None if it has none.

    The battery of a wireless mouse has the scope ``Device``.
    """
    own = [
        files
        for files in supplies.values()
        if files.get("type") == "Battery" and files.get("scope") != "Device"
    ]
    if not own:
        return None
    charges = [_number(files, "capacity") for files in own]
    known = [charge for charge in charges if charge is not None]
    draining = [files for files in own if files.get("status") == "Discharging"]
    powers = [power for power in map(_battery_power, draining) if power is not None]
    return BatterySample(
        charge=min(1.0, sum(known) / len(known) / 100) if known else None,
        discharging=bool(draining),
        power_w=sum(powers) if powers else None,
    )


def _battery_power(files: Mapping[str, str]) -> float | None:
    """Return watts; some batteries tell current and voltage instead, some a negative number."""
    power = _number(files, "power_now")
    if power is not None:
        return abs(power) / 1e6
    current, voltage = _number(files, "current_now"), _number(files, "voltage_now")
    return None if current is None or voltage is None else abs(current) * voltage / 1e12


def _number(files: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these figures that is there and a whole number."""
    for name in names:
        text = files.get(name, "")
        if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit():
            return int(text)
    return None
