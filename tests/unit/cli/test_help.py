"""Help is found by every usual spelling, lists commands by task, and suggests what was meant."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from barnraise.cli.help import SECTIONS, misplaced_options
from barnraise.cli.main import app


def type_words(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, words, prog_name="barnraise")
    return done.exit_code, done.output


def test_sections_name_every_command_once() -> None:
    listed = [name for _, names in SECTIONS for name in names]
    assert sorted(listed) == sorted(app.commands)


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",), ("help",)])
def test_help_is_shown_without_an_error(words: tuple[str, ...]) -> None:
    code, output = type_words(*words)
    assert code == 0
    for title, names in SECTIONS:
        assert f"{title}:" in output
        assert all(f"  {name} " in output for name in names)
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.parametrize("words", [("run", "-h"), ("help", "run"), ("hub", "-h"), ("hub", "up", "-h")])
def test_help_of_a_command_is_shown(words: tuple[str, ...]) -> None:
    code, output = type_words(*words)
    assert code == 0
    assert "Usage: barnraise" in output
    assert "Options" in output


def test_version_is_printed_by_both_spellings() -> None:
    assert type_words("version") == type_words("--version")


@pytest.mark.parametrize(("typed", "meant"), [("stat", "status"), ("jion", "join"), ("unpiar", "unpair")])
def test_mistyped_command_gets_a_suggestion(typed: str, meant: str) -> None:
    code, output = type_words(typed)
    assert code == 2
    assert f"Did you mean {meant}" in output


def test_unlike_command_gets_no_suggestion() -> None:
    assert "Did you mean" not in type_words("xyzzy")[1]


def test_options_of_ours_after_the_script_are_noticed() -> None:
    command = app.commands["run"]
    assert isinstance(command, click.Command)
    assert misplaced_options(command, ["--on", "pc", "--lr", "0.1", "--detach"]) == ["--on", "--detach"]
    assert misplaced_options(command, ["--epochs=3", "-x"]) == []


def test_completion_script_is_printed() -> None:
    code, output = type_words("completion", "bash")
    assert code == 0
    assert "_BARNRAISE_COMPLETE" in output
