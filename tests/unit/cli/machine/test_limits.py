"""Words of ``barnraise limit`` and ``barnraise pause``."""

from __future__ import annotations

from typing import Any

import pytest

from barnraise.agent_client.cluster_requests import LimitsResponse
from barnraise.agent_client.machine_limits import MachineLimits
from barnraise.cli.machine.limits import describe, read_changes
from barnraise.core.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "text", "field", "value"),
    [
        ("cpus", "4", "cpus", 4),
        ("cpus", "none", "cpus", 0),
        ("memory", "8GiB", "memory_bytes", 8 << 30),
        ("memory", "none", "memory_bytes", 0),
        ("gpu_memory", "50%", "gpu_memory_percent", 50),
        ("gpu_memory", "50", "gpu_memory_percent", 50),
        ("gpu_memory", "none", "gpu_memory_percent", 0),
        ("rate", "20mbit", "mbps", 20.0),
        ("rate", "none", "mbps", 0.0),
        ("hours", "22:00-07:00", "hours", "22:00-07:00"),
        ("hours", "none", "hours", ""),
        ("battery", "allow", "battery", "allow"),
        ("metered", "wait", "metered", "wait"),
    ],
)
def test_option_changes_its_limit_only(option: str, text: str, field: str, value: Any) -> None:
    assert read_changes({option: text}) == {field: value}


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("cpus", "0"),
        ("cpus", "-1"),
        ("cpus", "all"),
        ("gpu_memory", "101"),
        ("gpu_memory", "0"),
        ("memory", "much"),
        ("rate", "20"),
        ("hours", "22-7"),
    ],
)
def test_wrong_value_is_refused_with_a_hint(option: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_changes({option: text})
    assert error.value.hint


def test_pause_says_what_happens_to_each_run_and_how_to_undo_it() -> None:
    response = LimitsResponse(
        limits=MachineLimits(paused=True),
        reason="its user paused it",
        runs=(("train-k7z8", "continues on the other machines, and this one joins it again then"),),
    )
    lines = describe(response, is_pause=True)
    assert lines == [
        "This machine is paused: its user paused it.",
        "Run train-k7z8 continues on the other machines, and this one joins it again then.",
        "Undo: barnraise resume-machine",
    ]


def test_battery_concerns_runs_of_other_machines_only() -> None:
    lines = describe(LimitsResponse(limits=MachineLimits(), reason="it runs on battery"))
    assert lines[0] == "Runs of other machines do not use this one now: it runs on battery."


def test_limits_are_listed_with_those_that_do_not_exist() -> None:
    lines = describe(LimitsResponse(limits=MachineLimits(cpus=2, mbps=20, gpu_memory_percent=50)))
    assert lines[0] == "Runs may use this machine."
    assert "  processor cores: 2" in lines
    assert "  memory of a worker: all" in lines
    assert "  memory of each GPU: 50 %" in lines
    assert "  sending: 20 Mbit/s" in lines
    assert "  such runs on battery: wait" in lines
