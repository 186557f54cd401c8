"""Dry run of a split model on three processes: their measurements meet in one profile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from barnraise.agent_client.profile import DRY_RUN, PROFILE_FILE, SplitProfile, decode_profile
from barnraise.cli.plan.split import describe_split, report_of
from barnraise.collectives.torch_patch.torch_version import has_python_backends
from tests.repository import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(has_python_backends(torch.__version__), reason="this torch is refused"),
]


def test_three_machines_measure_blocks_and_links_and_train_nothing(tmp_path: Path) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("the members are forked")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "ACT": "three",
        DRY_RUN: "1",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    script = ROOT / "tests" / "unit" / "training" / "pipeline" / "split_workers.py"
    words = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(
        words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert (tmp_path / PROFILE_FILE).exists(), done.stderr[-8000:]
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == []
    profile = decode_profile((tmp_path / PROFILE_FILE).read_bytes())
    assert isinstance(profile, SplitProfile)
    assert len(profile.workers) == 3
    assert all(worker.forward_s > 0 and worker.backward_s > 0 for worker in profile.workers)
    for a in range(3):
        for b in range(3):
            assert profile.rates[a][b] > 1e5, "each pair has measured its link"
    report = report_of(profile)
    assert report.split is not None
    assert len(report.split.machines) + len(report.split.why_spare) == 3
    assert max(map(len, describe_split(report, 80).splitlines())) <= 80
