"""Devices with measured speeds."""

from __future__ import annotations

import msgspec

from barnraise.topology import Device, decode_machine, with_speeds
from barnraise.topology.devices import DeviceSpeed, ProbeReport, best_of, honest_notes
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


def test_with_speeds_adds_figures_to_machine() -> None:
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


def test_disturbed_probe_report_has_notes() -> None:
    assert honest_notes(ProbeReport(speeds=(_speed(1.0),))) == ()
    assert not ProbeReport(speeds=(_speed(1.0),)).disturbed
    for report in (
        ProbeReport(busy=0.5),
        ProbeReport(stolen=0.1),
        ProbeReport(speeds=(_speed(1.0, spread=0.6),)),
    ):
        assert report.disturbed
        assert len(honest_notes(report)) == 1


def test_best_of_keeps_higher_figure() -> None:
    first = ProbeReport(speeds=(_speed(2.0, gbps=10),), busy=0.5)
    second = ProbeReport(speeds=(_speed(1.0, gbps=40, spread=0.5),), busy=0.9)
    both = best_of(first, second)
    assert (both.speeds[0].tflops_fp32, both.speeds[0].memory_gbps) == (2.0, 40)
    assert (both.tries, both.busy) == (2, 0.5)
    assert best_of(None, second) == second


def test_decode_machine_replaces_terminal_commands() -> None:
    """A guest describes itself with the sequences that set a title and write the clipboard."""
    hostile = "linux\x1b]52;c;b3duZWQ=\x07 x; \x1b]0;owned\x07cpu"
    sent = msgspec.structs.replace(
        machine(Device("cpu", 0, hostile, 0)),
        os=hostile,
        os_version=hostile,
        arch=hostile,
        cpu_name=hostile,
        python=hostile,
        torch=hostile,
        barnraise=hostile,
        notes=("\u202enote", hostile),
    )
    received = decode_machine(msgspec.msgpack.encode(sent))
    assert received is not None
    texts = msgspec.json.encode(received).decode()
    assert "\\u001b" not in texts
    assert "\\u0007" not in texts
    assert received.notes[0] == "?note"
    assert received.os == "linux?]52;c;b3duZWQ=? x; ?]0;owned?cpu"


def test_decode_machine_of_malformed_bytes_is_none() -> None:
    assert decode_machine(b"") is None
    assert decode_machine(b"\x93") is None


def test_device_that_torch_does_not_know_is_not_used() -> None:
    """A card that the driver lists, and a torch that was built for the CPU."""
    here = machine(Device("cpu", 0, "AMD", 32 << 30), Device("cuda", 0, "RTX 4090", 24 << 30))
    assert here.torch_devices == ("cuda:0",), "before the probe"
    blind = with_speeds(here, ProbeReport(torch="2.13.0+cpu", accelerators=()))
    assert blind.torch_devices == ("cpu",)
    assert "torch 2.13.0+cpu cannot use RTX 4090 (cuda:0)" in blind.notes
    able = with_speeds(here, ProbeReport(torch="2.13.0", accelerators=(("cuda", 0), ("cuda", 1))))
    assert able.torch_devices == ("cuda:0",), "the second was seen, and not measured"
    unasked = with_speeds(here, ProbeReport(torch="2.13.0"))
    assert unasked.torch_devices == ("cuda:0",)
