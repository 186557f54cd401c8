"""Variables that limit a worker: its share of the line, and of the GPU's memory."""

from __future__ import annotations

import pytest

from barnraise.agent_client.machine_limits import MachineLimits
from barnraise.runs.worker_environment import _limit_variables


def test_workers_of_a_machine_share_the_line() -> None:
    assert _limit_variables(MachineLimits(mbps=20.0), {}, 2) == {"BARNRAISE_SEND_MBPS": "10"}


def test_machine_without_limits_sets_nothing() -> None:
    assert _limit_variables(MachineLimits(), {"PYTORCH_ALLOC_CONF": "backend:native"}, 1) == {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.5"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            {
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,per_process_memory_fraction:0.5",
                "PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.5",
            },
        ),
    ],
)
def test_limit_of_gpu_memory_is_in_the_variable_that_torch_reads(
    given: dict[str, str], expected: dict[str, str]
) -> None:
    """torch ignores the general variable where the one of CUDA is set."""
    variables = _limit_variables(MachineLimits(gpu_memory_percent=50), given, 1)
    metal = {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.5", "PYTORCH_MPS_LOW_WATERMARK_RATIO": "0.5"}
    assert variables == expected | metal
