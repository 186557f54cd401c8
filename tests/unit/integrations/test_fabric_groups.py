"""Fabric in a session of three processes, of which one is killed; see fabric_workers.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from barnraise.integrations.fabric import BarnraiseStrategy
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from benchmarks.agents.commits import judge, read_commits
from tests.repository import ROOT
from tests.unit.integrations.fabric_training import BATCH, SAMPLES, train

lightning_fabric = pytest.importorskip("lightning_fabric")

UNIT = 2  # samples of a micro-batch
DIES_AT = 5  # iterations of c


@pytest.mark.slow
def test_killed_worker_changes_nothing_and_every_sample_counts_once(tmp_path: Path) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("the members are forked")
    trace = tmp_path / "trace"
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    environment |= {
        "BARNRAISE_TRACE_COMMITS": str(trace),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    words = [sys.executable, str(Path(__file__).with_name("fabric_workers.py")), str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200, check=False)
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("?.json")}
    assert set(results) == {"a", "b"}, done.stderr[-6000:]
    killed_at = int((tmp_path / "killed").read_text())

    alone = Session(SingleWorkerManager(), seed=0, unit=UNIT, checkpoints=CheckpointManager(None, 60.0, 1))
    strategy = BarnraiseStrategy(alone, max_norm=0.5)
    fabric = lightning_fabric.Fabric(accelerator="cpu", strategy=strategy)
    expected = train(fabric, strategy.epochs, shuffle=True, max_norm=0.5)
    steps = 3 * SAMPLES // BATCH
    assert 0 <= killed_at < steps
    for result in results.values():
        # float32: three machines add the same gradients in another order.
        assert result["parameters"] == pytest.approx(expected.parameters, rel=1e-5, abs=1e-6)
        assert result["step"] == alone.step == steps
    assert results["a"]["parameters"] == results["b"]["parameters"], "the same bits"

    judgement = judge(read_commits(trace), BATCH // UNIT)
    assert judgement.violations == 0, judgement
    assert judgement.steps == steps
    assert judgement.steps_not_judged <= 1, "only the killed process may not have written down a step"
    iterations = sum(result["iterations"] for result in results.values())
    assert steps * BATCH // UNIT - DIES_AT <= iterations, "c has computed at most five of them"
    assert max(result["iterations"] for result in results.values()) < expected.iterations

    # What they gathered after each epoch, and what they wrote.
    for own, other in zip(results["a"]["seen"], results["b"]["seen"], strict=True):
        assert own[:3] == other[:3]
        assert own[1] == pytest.approx(sum(own[0]), rel=1e-6)
        assert len(own[0]) == own[2]
        assert [own[3], other[3]].count(True) == 1
    assert [entry[2] for entry in results["a"]["seen"]][-1] == 2
    for machine in "ab":
        written = torch.load(tmp_path / machine / "3.ckpt", weights_only=True)
        assert written["epochs"] == 3
        values = torch.cat([value.reshape(-1) for value in written["model"].values()])
        assert values.tolist() == results[machine]["parameters"]
