"""Dry run of a script: it measures a few steps, writes the profile, exits, and saves no checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from barnraise.agent_client.profile import DRY_RUN, PROFILE_FILE, StepProfile, decode_profile
from barnraise.training.group.agent_client import WorkerId
from barnraise.training.state.checkpoint_manager import CheckpointLocations

SCRIPT = """\
import sys, time, torch, barnraise
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
model[0].requires_grad_(False)
model = model.bfloat16() if "half" in sys.argv else model
optimizer = torch.optim.AdamW(model[1].parameters())
data = TensorDataset(torch.randn(96, 8))
run = barnraise.init(unit=4)
model, optimizer, batches = run.prepare(model, optimizer, DataLoader(data, batch_size=16))
for epoch in run.epochs(int(sys.argv[1])):
    for batch in batches:
        for (x,) in batch:
            loss = model(x.to(model[1].weight.dtype)).square().mean()
            loss.backward()
            time.sleep(0.005 if run.done else 0.05)  # the first step is slow
            optimizer.step()
            optimizer.zero_grad()
run.save("model.safetensors")
print("the end")
"""


def run(folder: Path, *arguments: str, dry: bool = True) -> str:
    (folder / "train.py").write_text(SCRIPT)
    environment = {**os.environ, DRY_RUN: "1" if dry else ""}
    done = subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_dry_run_measures_epoch_without_saving(tmp_path: Path) -> None:
    assert run(tmp_path, "1000", "half") == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == [PROFILE_FILE, "train.py"]
    profile = decode_profile((tmp_path / PROFILE_FILE).read_bytes())
    assert isinstance(profile, StepProfile)
    assert (profile.batch, profile.unit) == (16, 4)
    assert profile.parameters == 16 * 4 + 4
    assert profile.gradient_bytes == 4 * profile.parameters  # summed in float32
    assert profile.frozen_bytes == 2 * (8 * 16 + 16)
    (worker,) = profile.workers
    assert worker.is_warm
    # Three of the four units of each step, without the slow first one.
    assert 1 <= len(profile.steps_s) <= 5
    assert worker.samples == len(profile.steps_s) * 3 * 4
    assert worker.samples / worker.seconds < 4 / 0.005


def test_session_without_dry_run_trains_to_end(tmp_path: Path) -> None:
    assert run(tmp_path, "1", dry=False) == "the end\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "train.py"]


def test_dry_run_keeps_no_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BARNRAISE_CHECKPOINTS", str(tmp_path / "runs" / "a" / "checkpoints"))
    place = WorkerId("a", 0, 1, tmp_path, "aa")
    assert CheckpointLocations.of(place) is not None
    monkeypatch.setenv(DRY_RUN, "1")
    assert CheckpointLocations.of(place) is None
