"""Devices with measured speeds."""

from __future__ import annotations

from barnraise.topology import Device, with_speeds
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
