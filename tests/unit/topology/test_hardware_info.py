"""Hardware description of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from barnraise.topology import Device, describe_machine, hardware_info
from barnraise.topology.devices import Machine
from tests.unit.processor_time import least_cpu_s


def test_describe_machine_names_this_machine() -> None:
    machine = describe_machine()
    assert least_cpu_s(describe_machine) < 0.5, "meant to take milliseconds"
    assert machine.os in ("linux", "macos", "windows")
    assert machine.cores >= 1
    assert machine.memory_bytes > 1 << 28
    assert machine.python == ".".join(map(str, sys.version_info[:3]))
    assert machine.cpu_name
    assert machine.devices[0].kind == "cpu"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(machine), type=Machine) == machine


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: AMD Ryzen 9 7950X\nflags\t: x\n", "AMD Ryzen 9 7950X"),
        ("processor\t: 0\nBogoMIPS\t: 108.00\nModel\t\t: Raspberry Pi 5\n", "Raspberry Pi 5"),
        ("processor\t: 0\nmodel\t\t: 17\nBogoMIPS\t: 50.0\n", None),
        ("", None),
    ],
)
def test_cpu_name_is_read_per_architecture(text: str, name: str | None) -> None:
    assert hardware_info._cpuinfo_name(text) == name


def test_nvidia_cards_by_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"NVIDIA GeForce RTX 4090" if handle == 0 else "x" * 500,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=24 << 30),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(hardware_info, "_nvidia_seen", None)
    monkeypatch.setattr(hardware_info, "_torch_version", lambda: "2.13.0+cpu")
    machine = describe_machine()
    assert machine.devices[1] == Device("cuda", 0, "NVIDIA GeForce RTX 4090", 24 << 30)
    assert len(machine.devices[2].name) == 128
    assert any("built for the CPU only" in note for note in machine.notes)


def test_nvidia_cards_by_the_driver_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    (card / "information").write_text("Model: \t\t NVIDIA GeForce RTX 3060\nIRQ: 5\n")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(hardware_info, "_NVIDIA", tmp_path)
    monkeypatch.setattr(hardware_info, "_nvidia_seen", None)
    assert describe_machine().devices[1] == Device("cuda", 0, "NVIDIA GeForce RTX 3060", 0)
