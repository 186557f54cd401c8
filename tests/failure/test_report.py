"""Report of a real run with a real death: what it says is what happened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.pictures.scene import run_with_death

pytestmark = [pytest.mark.slow, pytest.mark.clocks, pytest.mark.timeout(900)]

NAMES = ("desk", "laptop")
STEPS = 120


def test_report_of_a_run_with_a_death_says_what_happened(tmp_path: Path) -> None:
    with run_with_death(tmp_path, NAMES, steps=STEPS, pause_s=0.3, kill_at=20) as scene:
        scene.type("report", scene.run, "--into", "running.html")
        assert "The run has not ended" in (tmp_path / "running.html").read_text(encoding="utf-8")
        scene.finish()
        printed = scene.type("report", "--into", "ended.html")
        view = scene.view()
    assert f"report of run {scene.run}: ended.html" in printed
    text = (tmp_path / "ended.html").read_text(encoding="utf-8")
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text.partition("</style>")[2]))
    assert (view.step, view.missing, view.samples) == (STEPS, 0, STEPS * 12)
    assert f"{STEPS} steps count, each exactly once. They contain {STEPS * 12:,} samples." in words
    assert f"{STEPS} × 12 = {STEPS * 12:,}, as many." in words
    died = next(event for event in view.events if event.kind == "died")
    assert died.text in words
    assert "signal 9" in words
    assert all(name in words for name in NAMES)
    assert "train.py" in words
    assert "No checkpoint was recorded." in words or view.checkpoints
