"""Compressed all-reduce of a session at two sites, with real processes; see site_workers.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.sync import Sync
from tests.repository import ROOT
from tests.unit.training.test_local_sgd import Training

REPOSITORY = ROOT
MEMBERS = Path(__file__).with_name("site_workers.py")
Results = dict[str, dict[str, Any]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the results by machine; the first machine died."""
    if not hasattr(os, "fork"):
        pytest.skip("the members are forked")
    room = tmp_path_factory.mktemp("sites")
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    words = [sys.executable, str(MEMBERS), str(room)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    assert not (room / "a.json").exists()
    return {machine: json.loads((room / f"{machine}.json").read_text()) for machine in "bcd"}


def test_rounds_across_sites_give_same_state(results: Results) -> None:
    rounds = [member["rounds"] for member in results.values()]
    assert all(member["hashes"] == rounds[0]["hashes"] and len(member["hashes"]) > 5 for member in rounds)
    assert rounds[0]["counts"][-1] == 3 * 12
    assert all(sites == 2 and bytes_ > 0 for member in rounds for sites, bytes_ in member["crossed"])
    # The pooled residuals are equal on all members, so any of them can save a checkpoint.
    assert all(member["pooled"] == rounds[0]["pooled"] for member in rounds)
    assert any(rounds[0]["pooled"])


def test_ring_strategy_ignores_sites(results: Results) -> None:
    rings = [member["ring"] for member in results.values()]
    assert all(member["hashes"] == rings[0]["hashes"] for member in rings)
    assert all(member["crossed"] and all(sites == 0 for sites, _ in member["crossed"]) for member in rings)


def test_site_leader_dying_loses_only_its_residual(results: Results) -> None:
    broken = [member["broken"] for member in results.values()]
    assert all(member["generation"] == 2 for member in broken)
    assert all(member["hashes"] == broken[0]["hashes"] for member in broken)
    assert broken[0]["counts"] == list(range(1, 25)), "no step was lost, and none was counted twice"
    assert all(sites == 2 for member in broken for sites, _ in member["crossed"])
    exact = Training(SingleWorkerManager(), Sync()).train(2)
    parameters = torch.tensor(broken[0]["parameters"], dtype=torch.float64)
    torch.testing.assert_close(parameters, exact.flat, rtol=0, atol=5e-3)
    assert not torch.equal(parameters, exact.flat)
