"""Colours appear only at a terminal and never with NO_COLOR; widths are those of the terminal, or 80."""

from __future__ import annotations

import ctypes
import io
import os
import sys
from types import SimpleNamespace

import click
import pytest

from barnraise.cli import terminal
from barnraise.cli.terminal import read_secret
from tests.arch.source_tree import files, module_name


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Device(Terminal):
    """A device of Windows that looks like a terminal: a console, or the null device."""

    def fileno(self) -> int:
        return 3


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


def test_only_the_terminal_module_tells_what_a_terminal_is() -> None:
    guilty = [module_name(file) for file in files() if ".isatty(" in file.read_text(encoding="utf-8")]
    assert guilty == ["barnraise.cli.terminal"]


@pytest.mark.parametrize(("console_mode", "secret"), [(0, ""), (1, "typed")])
def test_null_device_of_windows_gets_no_question(
    monkeypatch: pytest.MonkeyPatch, console_mode: int, secret: str
) -> None:
    """Only a console has a mode there."""

    def get_mode(handle: ctypes.c_void_p, mode: object) -> int:
        return console_mode if handle.value == 1003 else 0

    kernel = SimpleNamespace(GetConsoleMode=get_mode)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    crt = SimpleNamespace(get_osfhandle=lambda descriptor: 1000 + descriptor)
    monkeypatch.setitem(sys.modules, "msvcrt", crt)  # type: ignore[arg-type]
    monkeypatch.setattr(terminal, "sys", SimpleNamespace(platform="win32", stdin=Device()))
    monkeypatch.setattr(click, "prompt", lambda text, **options: "typed")
    assert read_secret("-", "Invite") == secret


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
