"""Speed probe and its cache."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from barnraise.topology import Device, describe_machine, measured_speeds, with_speeds
from barnraise.topology.devices import DeviceSpeed, ProbeReport
from barnraise.topology.probe import CACHE_NAME, hardware_key, remembered_speeds, run_probe
from tests.unit.event_loop import WithoutSubprocesses
from tests.unit.topology.graphs import machine


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


def _command(report: ProbeReport | str, *, before: str = "") -> list[str]:
    """Return a stand-in for the probe that prints this and counts its runs."""
    text = report if isinstance(report, str) else msgspec.json.encode(report).decode()
    return [sys.executable, "-c", f"{before}\nprint({text!r})"]


def _counting(directory: Path) -> str:
    return f"open({str(directory / 'runs')!r}, 'a').write('x')"


def _runs(directory: Path) -> int:
    file = directory / "runs"
    return len(file.read_text()) if file.exists() else 0


def test_good_measurement_is_made_once(tmp_path: Path) -> None:
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


def test_disturbed_measurement_is_tried_three_times(tmp_path: Path) -> None:
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
def test_failed_probe_becomes_note(command: list[str], words: str, tmp_path: Path) -> None:
    report = asyncio.run(measured_speeds(machine(), tmp_path, command=command))
    assert report.speeds == ()
    assert words in report.notes[0]
    assert not (tmp_path / CACHE_NAME).exists(), "a failure is not remembered"


def test_probe_runs_on_loop_without_subprocess_support() -> None:
    """The agent of Windows has such a loop, and its error would end the agent."""
    measured = ProbeReport(speeds=(_speed(1.5),))
    with asyncio.Runner(loop_factory=WithoutSubprocesses) as runner:
        assert runner.run(run_probe(_command(measured))) == measured


def test_hanging_probe_is_killed(tmp_path: Path) -> None:
    code = f"import time; time.sleep(600)  # of {tmp_path}"
    begin = time.monotonic()
    report = asyncio.run(run_probe([sys.executable, "-c", code], deadline_s=1.0))
    assert "did not end within 1 s" in report.notes[0]
    assert time.monotonic() - begin < 60
    survivors = [
        process.pid for process in psutil.process_iter(["cmdline"]) if code in (process.info["cmdline"] or ())
    ]
    assert survivors == []


def test_damaged_cache_is_written_again(tmp_path: Path) -> None:
    here = machine(Device("cpu", 0, "AMD", 32 << 30))
    command = _command(ProbeReport(speeds=(_speed(1.5),)))
    for rubbish in (b"", b"{", b'{"reports": {"x": 1}}', b'{"reports": {"\x80": 1}}', os.urandom(300_000)):
        (tmp_path / CACHE_NAME).write_bytes(rubbish)
        asyncio.run(measured_speeds(here, tmp_path, command=command))
        assert remembered_speeds(here, tmp_path) is not None


def test_probe_cache_is_bounded(tmp_path: Path) -> None:
    reports = {f"{number:032x}": msgspec.to_builtins(ProbeReport()) for number in range(40)}
    (tmp_path / CACHE_NAME).write_text(json.dumps({"reports": reports}))
    here = machine()
    asyncio.run(measured_speeds(here, tmp_path, command=_command(ProbeReport(speeds=(_speed(1.0),)))))
    kept = json.loads((tmp_path / CACHE_NAME).read_text())["reports"]
    assert len(kept) == 8
    assert hardware_key(here) in kept


def test_hardware_key_follows_hardware_and_torch() -> None:
    here = machine(Device("cpu", 0, "AMD", 32 << 30))
    same = msgspec.structs.replace(here, memory_bytes=here.memory_bytes - (1 << 20), python="3.13.0")
    assert hardware_key(same) == hardware_key(here)
    for change in ({"torch": None}, {"cpu_name": "Intel"}, {"memory_bytes": 64 << 30}, {"devices": ()}):
        assert hardware_key(msgspec.structs.replace(here, **change)) != hardware_key(here)


@pytest.mark.slow
def test_real_probe_measures_this_cpu(tmp_path: Path) -> None:
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
