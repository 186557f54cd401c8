"""The device probe is repeated until the machine is idle enough."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest import mock

import pytest

from barnraise.agent.cluster import link_probe
from barnraise.agent.cluster.link_probe import LinkProber
from barnraise.topology.devices import DeviceSpeed, ProbeReport

SPEED = DeviceSpeed(kind="cpu", index=0, name="x", memory_bytes=1, tflops_fp32=0.1)


@pytest.mark.parametrize(
    ("reports", "waits"),
    [
        ([ProbeReport(speeds=(SPEED,))], []),
        ([ProbeReport(notes=("too slow",)), ProbeReport(speeds=(SPEED,))], [30.0]),
        ([ProbeReport(speeds=(SPEED,), busy=0.9)] * 3, [600.0] * 3),
    ],
    ids=["at once", "failed at first", "always busy"],
)
def test_device_probe_failed_or_disturbed_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: list[ProbeReport], waits: list[float]
) -> None:
    slept: list[float] = []
    context = mock.Mock()

    async def measured(*_: object) -> ProbeReport:
        return reports.pop(0)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def probe() -> None:
        with mock.patch.object(asyncio, "sleep", sleep):
            await LinkProber(context, tmp_path)._probe()

    monkeypatch.setattr(link_probe, "measured_speeds", measured)
    asyncio.run(probe())
    assert not reports
    assert slept[1:] == waits
