"""Report of a real run with a real death: what it says is what happened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.pictures.scene import BATCH, run_with_death

pytestmark = [pytest.mark.slow, pytest.mark.clocks, pytest.mark.timeout(900)]

NAMES = ("desk", "laptop")
STEPS = 600


def test_report_of_a_run_with_a_death_says_what_happened(tmp_path: Path) -> None:
    with run_with_death(tmp_path, NAMES, steps=STEPS, kill_at=40) as scene:
        scene.type("report", scene.run, "--into", "running.html")
        assert "The run has not ended" in (tmp_path / "running.html").read_text(encoding="utf-8")
        scene.wait_for_end()
        printed = scene.type("report", "--into", "ended.html")
        view = scene.view()
    assert f"report of run {scene.run}: ended.html" in printed
    text = (tmp_path / "ended.html").read_text(encoding="utf-8")
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text.partition("</style>")[2]))
    assert (view.step, view.missing, view.samples) == (STEPS, 0, STEPS * BATCH)
    assert f"{STEPS} steps count, each exactly once. They contain {STEPS * BATCH:,} samples." in words
    assert f"{STEPS} × {BATCH} = {STEPS * BATCH:,}, as many." in words
    died = next(event for event in view.events if event.kind == "died")
    assert died.text in words
    assert f"laptop died at step {died.step} and came back at step" in words
    assert "signal 9" in words
    assert all(name in words for name in NAMES)
    assert "barnraise run train.py" in words
    assert "No checkpoint was recorded." in words or view.checkpoints
