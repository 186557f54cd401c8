"""Readings of GPUs as nvidia-smi prints them, and of this machine."""

from __future__ import annotations

import pytest

from barnraise.topology.readings import Readings, parse_gpus, read_machine


@pytest.mark.parametrize(
    ("text", "readings"),
    [
        ("6144, 61, 251.50, 93\n", Readings(6144 << 20, 61.0, 251.5, 0.93)),
        ("1024, 50, 100.0, 100\n2048, 70, 50.0, 0\n", Readings(3072 << 20, 70.0, 150.0, 0.5)),
        ("512, 40, [N/A], [N/A]\n", Readings(512 << 20, 40.0, None, None)),
        ("1, nan, -5, 1e99\n", Readings(1 << 20, None, None, None)),
        ("No devices were found\n", None),
        ("", None),
    ],
)
def test_lines_of_gpus_are_summed(text: str, readings: Readings | None) -> None:
    assert parse_gpus(text) == readings


def test_this_machine_has_a_reading() -> None:
    readings = read_machine()
    assert readings.used_bytes is None or readings.used_bytes > 0
    assert readings.load is None or 0 <= readings.load <= 1
