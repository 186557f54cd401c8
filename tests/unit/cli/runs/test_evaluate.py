"""Options of ``barnraise eval``, as they reach the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from barnraise.cli.main import app
from barnraise.cli.project_file import FILE_NAME
from barnraise.cli.runs import run
from barnraise.core.errors import ConfigError, RunError


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the current folder, with a model and tasks in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "tasks").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    return tmp_path


def starts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of what is started from now on."""
    started: list[Any] = []

    def start(*given: Any) -> int:
        started.append(given)
        return 0

    monkeypatch.setattr(run, "run", start)
    return started


def test_machines_are_named_as_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    started = starts(monkeypatch)
    words = ["eval", "--model", "./model", "--tasks", "mine", "--on", "mac,pc", "--on", "nas"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    ((script, arguments, _, options),) = started
    assert (script, arguments) == ("-m", ["barnraise.integrations.lm_eval", "--tasks", "mine"])
    assert options.on == ("mac", "pc", "nas")
    assert options.models == ("model=./model",)
    assert options.imports == ("lm_eval", "torch", "transformers", "accelerate")


def test_batch_size_of_one_machine_may_be_automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    started = starts(monkeypatch)
    words = ["eval", "--model", "./model", "--tasks", "mine", "--batch-size", "auto", "--on", "pc"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert started[0][1][-2:] == ["--batch-size", "auto"]


def test_options_stand_in_the_project_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = starts(monkeypatch)
    monkeypatch.chdir(tmp_path)
    lines = ('on = ["mac", "pc"]', "restarts = 5", 'set = { A = "1" }', 'model = { base = "./llama" }')
    (tmp_path / FILE_NAME).write_text("[run]\n" + "\n".join(lines))
    words = ["eval", "--model", "./model", "--tasks", "mine"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "options from barnraise.toml: on = mac, pc; restarts = 5" in result.stderr
    assert CliRunner().invoke(app, [*words, "--on", "nas"]).exit_code == 0
    assert CliRunner().invoke(app, [*words, "--no-project-file"]).exit_code == 0
    assert [options.on for *_, options in started] == [("mac", "pc"), ("nas",), ()]
    assert [chosen.restarts for _, _, chosen, _ in started] == [5, 5, 3]
    assert started[0][3].models == ("model=./model",), "the model of the file is one of the script"
    assert started[0][3].variables == (("A", "1"),)


def test_mistake_in_the_project_file_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = starts(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / FILE_NAME).write_text("[run]\ntasks = 'mine'\n")
    result = CliRunner().invoke(app, ["eval", "--tasks", "mine"])
    assert isinstance(result.exception, ConfigError)
    assert "'tasks' is not an option of `barnraise run`" in result.exception.message
    assert not started


@pytest.mark.parametrize("argument", ["pretrained=gpt2", "dtype=float32, device=cpu", "batch_size=4"])
def test_argument_that_a_worker_sets_is_refused_by_its_name(
    argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = starts(monkeypatch)
    words = ["eval", "--model", "./model", "--tasks", "mine", "--model-args", argument]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, RunError)
    name = argument.rpartition("=")[0].rpartition(" ")[2]
    assert result.exception.message == f"--model-args must not set {name}"
    assert not started


def test_model_that_each_machine_has_is_named_by_its_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    started = starts(monkeypatch)
    words = ["eval", "--tasks", "mine", "--model-args", "pretrained=/models/llama,dtype=float32"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert started[0][1][1:3] == ["--model-args", "pretrained=/models/llama,dtype=float32"]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("--model", "./modle"), "there is no folder of a model at ", "Name a folder"),
        (("--model", "base=./model"), "eval has one model", "Leave the name out: --model ./model"),
        (("--model", "./adapter"), "./adapter is an adapter", "barnraise export RUN ../merged --merged"),
        ((), "no model was named", "--model ../merged"),
        (("--model", "./model", "--include-path", "taks"), "there is no folder taks", "Did you mean tasks?"),
        (("--model", "./model", "--include-path", ".."), ".. is outside of the folder that is sent", "Copy"),
        (
            ("--model", "./model", "--batch-size", "auto"),
            "--batch-size auto finds another size",
            "--on MACHINE",
        ),
        (
            ("--model", "./model", "--batch-size", "auto:4", "--on", "mac,pc"),
            "--batch-size auto:4 finds another size",
            "Write a number",
        ),
    ],
)
def test_mistake_is_named_before_anything_is_sent(
    words: tuple[str, ...], message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = starts(monkeypatch)
    result = CliRunner().invoke(app, ["eval", "--tasks", "mine", *words])
    assert isinstance(result.exception, RunError)
    assert result.exception.message.startswith(message)
    assert hint in result.exception.hint
    assert not started


def test_folder_of_tasks_is_sent_by_its_relative_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    started = starts(monkeypatch)
    words = ["eval", "--model", "./model", "--tasks", "mine", "--include-path", str(folder / "tasks")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert started[0][1][-2:] == ["--include-path", "tasks"]
