"""Colours appear only at a terminal and never with NO_COLOR; widths are those of the terminal, or 80."""

from __future__ import annotations

import io
import os
import sys

import click
import pytest

from barnraise.cli import terminal
from barnraise.cli.terminal import read_secret
from tests.arch.source_tree import files, module_name


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_text_is_painted_only_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert terminal.painted("pc", colour="cyan") == "\x1b[36mpc\x1b[0m"
    assert terminal.painted("pc", colour="cyan", err=True) == "pc"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_text_is_not_painted_if_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert terminal.painted("pc", colour="cyan", bold=True, dim=True) == "pc"


def test_width_is_that_of_the_variable_or_eighty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "132")
    assert terminal.columns() == 132
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(os, "get_terminal_size", lambda stream: os.terminal_size((0, 0)))
    assert terminal.columns() == 80


def test_wrapped_lines_fit_and_keep_their_indent() -> None:
    lines = terminal.wrapped("  a sentence of several words", 20, "    ").splitlines()
    assert lines == ["  a sentence of", "    several words"]


def test_redraw_goes_back_to_where_the_picture_began(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.redraw("one\ntwo", 0)
    terminal.redraw("three", 2)
    assert capsys.readouterr().out == "one\ntwo\n\x1b[2F\x1b[Jthree\n"


def test_only_the_terminal_module_decides_about_colours() -> None:
    guilty = [
        module_name(file)
        for file in files()
        if module_name(file).startswith("barnraise.cli.")
        and module_name(file) != "barnraise.cli.terminal"
        and any(sign in file.read_text(encoding="utf-8") for sign in ("click.style", "secho(", "NO_COLOR"))
    ]
    assert guilty == []


def test_secret_is_read_from_standard_input_for_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of a command line are visible to every user of the machine."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(" barnraise-invite:x \nyes\n"))
    assert read_secret("barnraise-invite:y", "Invite") == "barnraise-invite:y"
    assert read_secret("-", "Invite") == "barnraise-invite:x"
    assert sys.stdin.readline() == "yes\n", "the next question gets its own line"


def test_secret_is_asked_for_at_a_terminal_without_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    questions: list[tuple[str, bool]] = []

    def prompt(text: str, *, hide_input: bool, err: bool) -> str:
        questions.append((text, hide_input))
        return "word"

    monkeypatch.setattr(click, "prompt", prompt)
    assert read_secret("-", "Invite") == "word"
    assert questions == [("Invite", True)]
