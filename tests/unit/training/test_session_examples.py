"""Examples: each runs alone at small size, and learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT

EXAMPLES = ROOT / "examples"


def run(name: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--small"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_example_images_trains(tmp_path: Path) -> None:
    match = re.search(r"([\d.]+)% of 500 new images", run("images.py", tmp_path))
    assert match is not None
    assert float(match[1]) > 60
    assert (tmp_path / "shapes.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_example_characters_trains(tmp_path: Path) -> None:
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", run("characters.py", tmp_path))]
    assert losses[-1] < 3.0
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_example_lora_trains(tmp_path: Path) -> None:
    match = re.search(r"(\d+)% right before, (\d+)% after", run("lora.py", tmp_path))
    assert match is not None
    assert int(match[2]) > int(match[1]) + 5


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_example_predict_labels_all_images(tmp_path: Path) -> None:
    assert "2000 images on 1 machines" in run("predict.py", tmp_path)
    labels = (tmp_path / "labels.txt").read_text().splitlines()
    assert len(labels) == 2000
    assert set(labels) <= {"0", "1", "2"}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "adapter"), [("finetune_llm.py", "adapter"), ("sft_trainer.py", "sft-adapter")]
)
def test_example_of_a_trainer_learns(tmp_path: Path, name: str, adapter: str) -> None:
    pytest.importorskip("peft", reason="needs peft")
    pytest.importorskip("trl", reason="needs trl")
    losses = [float(text) for text in re.findall(r"'loss': '?([\d.]+)", run(name, tmp_path))]
    assert losses[-1] < 0.8 * losses[0]
    assert (tmp_path / adapter / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_example_sweep_finds_values(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    match = re.search(
        r"8 trials; best: ([\d.]+)% errors with {'width': \d+, 'rate': ", run("sweep.py", tmp_path)
    )
    assert match is not None
    assert float(match[1]) < 45


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_example_fabric_trains(tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric")
    printed = run("fabric.py", tmp_path)
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < 0.95 * losses[0], printed
    assert (tmp_path / "spiral.ckpt").exists()
