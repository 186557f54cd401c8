"""nvidia-smi: lines of cards give samples; what a card lacks is unknown."""

from __future__ import annotations

import pytest

from barnraise.core.devices.nvidia_smi import parse_cards
from barnraise.core.devices.sample import DeviceSample

LINES = "0, NVIDIA GeForce RTX 3090, 41, 10240, 24576, 63, 310.52\n1, Tesla K80, [N/A], 3, 11441, 30, [N/A]\n"


def test_lines_give_samples() -> None:
    first, second = parse_cards(LINES)
    assert first == DeviceSample(
        name="cuda:0",
        kind="cuda",
        model="NVIDIA GeForce RTX 3090",
        utilization=0.41,
        memory_used=10240 << 20,
        memory_total=24576 << 20,
        temperature_c=63.0,
        power_w=310.52,
    )
    assert (second.name, second.utilization, second.power_w) == ("cuda:1", None, None)


@pytest.mark.parametrize("text", ["", "No devices were found\n", "0, x\n", "a, b, 1, 2, 3, 4, 5\n"])
def test_other_text_gives_no_cards(text: str) -> None:
    assert parse_cards(text) == []
