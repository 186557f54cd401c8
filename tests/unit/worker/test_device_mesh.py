"""`barnraise.device_mesh` on real processes: hybrid sharding, and fewer machines that continue."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import barnraise
from barnraise.core.errors import RunError
from tests.unit.worker import mesh_program

PROGRAM = Path(mesh_program.__file__)


def train(machines: str, last: int, tmp_path: Path) -> dict[str, Any]:
    """Train on these machines, one letter for each rank, up to a step. Return what rank 0 reports."""
    report = tmp_path / "report.json"
    program = [str(PROGRAM), machines, str(tmp_path / "shards"), str(last), str(report)]
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(machines)}"]
    result = subprocess.run(
        [sys.executable, *start, *program], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    read: dict[str, Any] = json.loads(report.read_text())
    return {**read, "said": result.stderr}


def losses_alone(steps: int) -> list[float]:
    model = mesh_program.model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = (model(mesh_program.batch_of(step)) ** 2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_hybrid_sharding_continues_on_fewer_machines(tmp_path: Path) -> None:
    expected = losses_alone(6)
    four = train("aabb", 3, tmp_path)
    assert (four["names"], four["mesh"]) == (["replicate", "shard"], [[0, 1], [2, 3]])
    assert "device mesh: 2 ranks of one machine share the shards" in four["said"]
    assert four["losses"] == pytest.approx(expected[:3], rel=1e-5)
    two = train("ab", 6, tmp_path)
    assert (two["names"], two["mesh"], two["done"]) == (["shard"], [0, 1], 3)
    assert two["losses"] == pytest.approx(expected[3:], rel=1e-5)


def test_mesh_without_a_process_group_is_refused() -> None:
    with pytest.raises(RunError, match="needs the process group"):
        barnraise.device_mesh()
