"""This machine's description and its speed probe."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from barnraise.topology import Device, describe_machine, hardware_info, measured_speeds, with_speeds
from barnraise.topology.devices import DeviceSpeed, Machine, ProbeReport, best_of, honest_notes
from barnraise.topology.probe import CACHE_NAME, hardware_key, remembered_speeds, run_probe
from tests.unit.processor_time import least_cpu_s
from tests.unit.topology.graphs import machine


def test_this_machine() -> None:
    found = describe_machine()
    assert least_cpu_s(describe_machine) < 0.5, "meant to take milliseconds"
    assert found.os in ("linux", "macos", "windows")
    assert found.cores >= 1
    assert found.memory_bytes > 1 << 28
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.cpu_name
    assert found.devices[0].kind == "cpu"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Machine) == found


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: AMD Ryzen 9 7950X\nflags\t: x\n", "AMD Ryzen 9 7950X"),
        ("processor\t: 0\nBogoMIPS\t: 108.00\nModel\t\t: Raspberry Pi 5\n", "Raspberry Pi 5"),
        ("processor\t: 0\nmodel\t\t: 17\nBogoMIPS\t: 50.0\n", None),
        ("", None),
    ],
)
def test_names_of_processors(text: str, name: str | None) -> None:
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
    found = describe_machine()
    assert found.devices[1] == Device("cuda", 0, "NVIDIA GeForce RTX 4090", 24 << 30)
    assert len(found.devices[2].name) == 128
    assert any("built for the CPU only" in note for note in found.notes)


def test_nvidia_cards_by_the_driver_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    (card / "information").write_text("Model: \t\t NVIDIA GeForce RTX 3060\nIRQ: 5\n")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(hardware_info, "_NVIDIA", tmp_path)
    monkeypatch.setattr(hardware_info, "_nvidia_seen", None)
    assert describe_machine().devices[1] == Device("cuda", 0, "NVIDIA GeForce RTX 3060", 0)


def _speed(tflops: float, *, gbps: float = 50.0, spread: float = 0.01, kind: str = "cpu") -> DeviceSpeed:
    return DeviceSpeed(
        kind=kind,  # type: ignore[arg-type]
        index=0,
        name="" if kind == "cpu" else "Arc A770",
        memory_bytes=16 << 30,
        tflops_fp32=tflops,
        memory_gbps=gbps,
        spread=spread,
    )


def test_speeds_join_the_description() -> None:
    here = machine(Device("cpu", 0, "AMD", 32 << 30))
    report = ProbeReport(speeds=(_speed(1.5), _speed(17.0, kind="xpu")), busy=0.7, notes=("a note",))
    joined = with_speeds(here, report)
    assert joined.devices == (
        Device("cpu", 0, "AMD", 32 << 30, 1.5, 50.0),
        Device("xpu", 0, "Arc A770", 16 << 30, 17.0, 50.0),
    )
    assert joined.notes[0] == "a note"
    assert "busy" in joined.notes[1]
    assert with_speeds(here, None) == here


def test_disturbance_is_said() -> None:
    assert honest_notes(ProbeReport(speeds=(_speed(1.0),))) == ()
    assert not ProbeReport(speeds=(_speed(1.0),)).disturbed
    for report in (
        ProbeReport(busy=0.5),
        ProbeReport(stolen=0.1),
        ProbeReport(speeds=(_speed(1.0, spread=0.6),)),
    ):
        assert report.disturbed
        assert len(honest_notes(report)) == 1


def test_the_better_of_two_tries_counts() -> None:
    first = ProbeReport(speeds=(_speed(2.0, gbps=10),), busy=0.5)
    second = ProbeReport(speeds=(_speed(1.0, gbps=40, spread=0.5),), busy=0.9)
    both = best_of(first, second)
    assert (both.speeds[0].tflops_fp32, both.speeds[0].memory_gbps) == (2.0, 40)
    assert (both.tries, both.busy) == (2, 0.5)
    assert best_of(None, second) == second


def _command(report: ProbeReport | str, *, before: str = "") -> list[str]:
    """A stand-in for the probe that prints this and counts how often it ran."""
    text = report if isinstance(report, str) else msgspec.json.encode(report).decode()
    return [sys.executable, "-c", f"{before}\nprint({text!r})"]


def _counting(directory: Path) -> str:
    return f"open({str(directory / 'runs')!r}, 'a').write('x')"


def _runs(directory: Path) -> int:
    file = directory / "runs"
    return len(file.read_text()) if file.exists() else 0


def test_a_good_measurement_is_made_once(tmp_path: Path) -> None:
    here = machine(Device("cpu", 0, "AMD", 32 << 30))
    command = _command(ProbeReport(speeds=(_speed(1.5),)), before=_counting(tmp_path))
    state = tmp_path / "state"
    assert remembered_speeds(here, state) is None
    first = asyncio.run(measured_speeds(here, state, command=command))
    assert asyncio.run(measured_speeds(here, state, command=command)) == first
    assert _runs(tmp_path) == 1
    other = msgspec.structs.replace(here, torch="2.14.0")
    asyncio.run(measured_speeds(other, state, command=command))
    assert _runs(tmp_path) == 2
    asyncio.run(measured_speeds(here, state, command=command, again=True))
    assert _runs(tmp_path) == 3
    assert [file.name for file in state.iterdir()] == [CACHE_NAME], "no drafts are left behind"


def test_a_disturbed_measurement_is_tried_three_times(tmp_path: Path) -> None:
    here = machine(Device("cpu", 0, "AMD", 32 << 30))
    command = _command(ProbeReport(speeds=(_speed(1.5),), busy=0.9), before=_counting(tmp_path))
    for _ in range(5):
        report = asyncio.run(measured_speeds(here, tmp_path, command=command))
    assert _runs(tmp_path) == 3
    assert report.tries == 3


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([sys.executable, "-c", "raise SystemExit('no luck')"], "no luck"),
        ([sys.executable, "-c", "pass"], "ended with 0"),
        (_command("{"), "cannot be read"),
        (_command('{"speeds": 7}'), "cannot be read"),
        (["/nowhere/python"], "could not be started"),
    ],
)
def test_a_probe_that_fails_is_a_note(command: list[str], words: str, tmp_path: Path) -> None:
    report = asyncio.run(measured_speeds(machine(), tmp_path, command=command))
    assert report.speeds == ()
    assert words in report.notes[0]
    assert not (tmp_path / CACHE_NAME).exists(), "a failure is not remembered"


def test_a_probe_that_hangs_is_ended(tmp_path: Path) -> None:
    code = f"import time; time.sleep(600)  # of {tmp_path}"
    begin = time.monotonic()
    report = asyncio.run(run_probe([sys.executable, "-c", code], deadline_s=1.0))
    assert "did not end within 1 s" in report.notes[0]
    assert time.monotonic() - begin < 60
    left = [one.pid for one in psutil.process_iter(["cmdline"]) if code in (one.info["cmdline"] or ())]
    assert left == []


def test_a_spoilt_cache_is_made_anew(tmp_path: Path) -> None:
    here = machine(Device("cpu", 0, "AMD", 32 << 30))
    command = _command(ProbeReport(speeds=(_speed(1.5),)))
    for rubbish in (b"", b"{", b'{"reports": {"x": 1}}', b'{"reports": {"\x80": 1}}', os.urandom(300_000)):
        (tmp_path / CACHE_NAME).write_bytes(rubbish)
        asyncio.run(measured_speeds(here, tmp_path, command=command))
        assert remembered_speeds(here, tmp_path) is not None


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    reports = {f"{number:032x}": msgspec.to_builtins(ProbeReport()) for number in range(40)}
    (tmp_path / CACHE_NAME).write_text(json.dumps({"reports": reports}))
    here = machine()
    asyncio.run(measured_speeds(here, tmp_path, command=_command(ProbeReport(speeds=(_speed(1.0),)))))
    kept = json.loads((tmp_path / CACHE_NAME).read_text())["reports"]
    assert len(kept) == 8
    assert hardware_key(here) in kept


def test_the_key_follows_hardware_and_torch() -> None:
    here = machine(Device("cpu", 0, "AMD", 32 << 30))
    same = msgspec.structs.replace(here, memory_bytes=here.memory_bytes - (1 << 20), python="3.13.0")
    assert hardware_key(same) == hardware_key(here)
    for change in ({"torch": None}, {"cpu_name": "Intel"}, {"memory_bytes": 64 << 30}, {"devices": ()}):
        assert hardware_key(msgspec.structs.replace(here, **change)) != hardware_key(here)


@pytest.mark.slow
def test_the_real_probe_measures_this_cpu(tmp_path: Path) -> None:
    here = describe_machine()
    report = asyncio.run(measured_speeds(here, tmp_path))
    assert report.notes == ()
    speed = next(speed for speed in report.speeds if speed.kind == "cpu")
    assert speed.tflops_fp32 is not None
    assert 1e-4 < speed.tflops_fp32 < 100
    assert speed.memory_gbps is not None
    assert 0.05 < speed.memory_gbps < 5000
    assert with_speeds(here, report).devices[0].tflops_fp32 == speed.tflops_fp32
    assert remembered_speeds(here, tmp_path) == report
