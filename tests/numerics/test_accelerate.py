"""An unmodified Hugging Face Accelerate script on two processes equals the same script on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hub.process import free_port
from tests.numerics.harness.pool import REPOSITORY

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "accelerate_training.py"
WORLD = 2


def _start(arguments: list[str], rank: int, world: int, port: int) -> subprocess.Popen[str]:
    environment = dict(os.environ, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    if world > 1:
        environment.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )


def _run(before: list[str], world: int, batch: int, state: Path) -> dict[str, Any]:
    port = free_port()
    arguments = [*before, str(SCRIPT), "--batch-size", str(batch), "--state", str(state)]
    processes = [_start(arguments, rank, world, port) for rank in range(world)]
    try:
        outputs = [process.communicate(timeout=110) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    report = "".join(
        f"rank {rank} ended with {process.returncode}:\n{errors[-3000:]}\n"
        for rank, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True))
    )
    assert all(process.returncode == 0 for process in processes), report
    lines = [line for line in outputs[0][0].splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _run([], 1, 4 * WORLD, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    ("before", "group"),
    [
        ([], "gloo"),
        (["-m", "tests.numerics.harness.launch", "barnraise"], "barnraise"),
    ],
    ids=["gloo", "barnraise"],
)
def test_unmodified_script_trains_on_backend(
    before: list[str], group: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    together = _run(before, WORLD, 4, tmp_path)
    assert together["group"] == group
    assert together["processes"] == WORLD
    assert together["note"] == "from the main process"
    assert together["summed"] == sum(range(1, WORLD + 1))
    assert together["weights"] == pytest.approx(alone["weights"], abs=1e-12)
    assert together["predictions"] == pytest.approx(alone["predictions"], abs=1e-12)
