"""`barnraise plan --config`: how a language model would be split, without measuring it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from barnraise.cli.main import main
from barnraise.cli.plan import plan as planning
from barnraise.cli.plan.options import PlanOptions
from barnraise.core.errors import ConfigError
from tests.unit.planning.split.test_language_model import LLAMA

MACHINES = ("--add", "3090@1gbit", "--add", "3060@1gbit", "--add", "mac-m2-max@wifi")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "80")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    return model


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["barnraise", "plan", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def report(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, Any]:
    assert typed(monkeypatch, "--config", str(folder), *MACHINES, "--json", *arguments) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_model_is_split_over_machines_that_no_home_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, "--config", str(folder), *MACHINES) == 0
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "The model has 32 blocks, which are its layers" in flat
    assert "16 samples in 8 pieces, called micro-batches" in flat
    assert "Predicted: " in flat
    assert "Nothing was measured with this model. It is taken to be trained with LoRA" in flat
    assert "3090@1gbit is hypothetical" in flat


def test_narrow_base_and_fewer_tokens_make_a_step_shorter(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = report(folder, monkeypatch, capsys)
    narrow = report(folder, monkeypatch, capsys, "--base", "nf4")
    short = report(folder, monkeypatch, capsys, "--tokens", "256")
    memory = [sum(stage["memory_bytes"] for stage in each["stages"]) for each in (narrow, exact)]
    assert memory[0] < memory[1]
    assert short["step"]["step_s"] < exact["step"]["step_s"]
    assert exact["batch"] == 16
    assert report(folder, monkeypatch, capsys, "--batch", "4")["micro_batches"] == 4


def test_model_that_fits_nowhere_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, "--config", str(folder), "--add", "pi5@wifi") == 1
    assert "It cannot be split over these machines" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"parameters": "8B"}, "--config says how large the model is"),
        ({"seconds_per_sample": "12ms"}, "--config says how large the model is"),
        ({"config": None}, "needs the size of a model"),
        ({"config": None, "parameters": "8B", "base": "nf4"}, "--base goes with --config"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    given: dict[str, Any], words: str, folder: Path
) -> None:
    size = planning.Size(**{"config": folder, **given})
    with pytest.raises(ConfigError, match=words):
        planning.run(size, on=(), wishes=PlanOptions(add=("3090@1gbit",)))


def test_options_of_other_plans_are_refused(folder: Path) -> None:
    wishes = PlanOptions(add=("3090@1gbit",), sync="auto")
    with pytest.raises(ConfigError, match="do not work with a split model"):
        planning.run(planning.Size(config=folder), on=(), wishes=wishes)


@pytest.mark.parametrize("content", [None, "{", "[]", "[" * 100_000])
def test_config_that_cannot_be_read_is_named(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="--config"):
        planning.run(planning.Size(config=tmp_path), on=(), wishes=PlanOptions(add=("3090@1gbit",)))
