"""Variables of a worker: the encoding of its output, its share of the line, and of the GPU's memory."""

from __future__ import annotations

import pytest

from barnraise.agent_client.machine_limits import MachineLimits
from barnraise.runs.record import RunRecord, WorkerSlot
from barnraise.runs.worker_environment import _limit_variables, worker_environment
from tests.unit.runs.control.test_lifecycle import A, order


@pytest.mark.parametrize(("given", "encoding"), [({}, "utf-8"), ({"PYTHONIOENCODING": "ascii"}, "ascii")])
def test_worker_prints_in_the_encoding_of_logs_unless_the_user_chose_one(
    given: dict[str, str], encoding: str
) -> None:
    """On Windows a pipe has another encoding, which lacks many letters."""
    assert _variables(given)["PYTHONIOENCODING"] == encoding


@pytest.mark.parametrize(("values", "autoload"), [({}, "1"), ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "0")])
def test_torch_loads_our_backend_unless_the_user_of_the_run_says_no(
    values: dict[str, str], autoload: str
) -> None:
    variables = _variables({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, values)
    assert variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] == autoload


def test_model_cache_of_a_run_replaces_that_of_the_machine_unless_the_user_of_the_run_says_no() -> None:
    machine = {"HF_HUB_CACHE": "/home/me/hub", "TRANSFORMERS_CACHE": "/old", "HF_HOME": "/hf"}
    assert _variables(machine)["HF_HUB_CACHE"] == "/home/me/hub"
    own = _variables(machine, cache="/runs/x/cache")
    assert (own["HF_HUB_CACHE"], own["HF_HUB_OFFLINE"], own["HF_HOME"]) == ("/runs/x/cache", "1", "/hf")
    assert "TRANSFORMERS_CACHE" not in own
    assert _variables(machine, {"HF_HUB_OFFLINE": "0"}, cache="/runs/x/cache")["HF_HUB_OFFLINE"] == "0"


def _variables(
    base: dict[str, str], values: dict[str, str] | None = None, cache: str = "", device: str = ""
) -> dict[str, str]:
    return worker_environment(
        base,
        order(device=device),
        RunRecord(order=b"", signature=bytes(64), slots=(WorkerSlot(A, 0, device or "cpu"),), generation=1),
        0,
        start=1,
        state_directory="",
        local_store="",
        checkpoints="",
        data={},
        model_cache=cache,
        cores=1,
        values=values or {},
        limits=MachineLimits(),
    )


@pytest.mark.parametrize(
    ("given", "device", "visible"),
    [({}, "cuda:1", "1"), ({"CUDA_VISIBLE_DEVICES": "2, 5"}, "cuda:1", "5"), ({}, "mps", None)],
)
def test_job_with_one_gpu_sees_no_other(given: dict[str, str], device: str, visible: str | None) -> None:
    variables = _variables(given, device=device)
    assert variables.get("CUDA_VISIBLE_DEVICES") == visible
    assert variables["BARNRAISE_DEVICE"] == ("cuda:0" if visible else device)
    assert "CUDA_VISIBLE_DEVICES" not in _variables({}), "an ordinary run sees all"


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
