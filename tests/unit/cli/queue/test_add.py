"""Arguments that ``barnraise queue add`` expands or rejects, before it sends anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from barnraise.cli.main import app
from barnraise.core.errors import RunError


def add(folder: Path, *words: str) -> str:
    """Return what a dry run prints, or the error that it raises."""
    (folder / "train.py").touch()
    words = ("queue", "add", "--dry-run", "--folder", str(folder), *words)
    result = CliRunner().invoke(app, words)
    if isinstance(result.exception, RunError):
        return f"{result.exception.message}: {result.exception.hint}"
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_dry_run_prints_each_job(tmp_path: Path) -> None:
    printed = add(tmp_path, "train.py", "--lr", "1e-4,3e-4", "--seed", "0..1", "--each", "device")
    assert printed.splitlines() == [
        "4 jobs: 2 of --lr x 2 of --seed",
        "  train.py --lr 1e-4 --seed 0",
        "  train.py --lr 1e-4 --seed 1",
        "  train.py --lr 3e-4 --seed 0",
        "  train.py --lr 3e-4 --seed 1",
    ]


def test_dry_run_after_the_script_adds_no_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ("queue", "add", "train.py", "--lr", "1e-4,3e-4", "--dry-run")
    result = CliRunner().invoke(app, words)
    assert result.exception is None, result.output
    assert result.output.splitlines()[1:] == ["  train.py --lr 1e-4", "  train.py --lr 3e-4"]


def test_option_that_the_script_gets_is_pointed_out(tmp_path: Path) -> None:
    printed = add(tmp_path, "train.py", "--on", "pc", "--", "--name", "of-the-script")
    assert "--on comes after train.py, so the script gets it" in printed
    assert "--name comes after" not in printed


@pytest.mark.parametrize("word", ["--sync", "--set"])
def test_option_that_does_not_exist_is_no_script(tmp_path: Path, word: str) -> None:
    assert add(tmp_path, word, "auto", "train.py").startswith(f"there is no option {word} here: ")


def test_wait_is_not_in_the_help() -> None:
    printed = CliRunner().invoke(app, ["queue", "add", "--help"]).output
    assert "--wait" not in printed
    assert "--restarts" in printed


def test_arguments_after_two_dashes_are_not_expanded(tmp_path: Path) -> None:
    printed = add(tmp_path, "train.py", "--seed", "0..1", "--", "--layers", "64,64")
    assert printed.splitlines()[1:] == [
        "  train.py --seed 0 --layers 64,64",
        "  train.py --seed 1 --layers 64,64",
    ]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--per-node", "2"],
            "a job on one device has one worker, and --per-node asks for 2: .*--each machine",
        ),
        (["--min-nodes", "2"], "each job runs on one machine, and --min-nodes asks for 2: .*--each all"),
        (["--min-nodes", "2", "--each", "machine"], "each job runs on one machine"),
    ],
)
def test_job_that_needs_more_than_it_gets_is_rejected(tmp_path: Path, words: list[str], error: str) -> None:
    printed = add(tmp_path, *words, "train.py")
    assert re.match(error, printed), printed


@pytest.mark.parametrize(
    "words", [["--per-node", "2", "--each", "machine"], ["--min-nodes", "2", "--each", "all"]]
)
def test_job_that_gets_what_it_needs_is_accepted(tmp_path: Path, words: list[str]) -> None:
    assert add(tmp_path, *words, "train.py") == "  train.py\n"
