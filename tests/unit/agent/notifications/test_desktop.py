"""Commands that show a notice on the desktop; Linux's is run with a program in its place."""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path

import pytest

from barnraise.agent.notifications.desktop import (
    desktop_command,
    missing_program,
    session_variables,
    show,
)
from tests.unit.agent.notifications.test_notice import notice

EVIL = "\"; $(touch /tmp/x) `id` ' <b>&"


def test_linux_gets_words_without_markup() -> None:
    words, variables = desktop_command("linux", "--title", EVIL)
    assert words[:3] == ("notify-send", "--app-name=Barnraise", "--")
    assert words[3:] == ("--title", "\"; $(touch /tmp/x) `id` ' &lt;b&gt;&amp;")
    assert variables == {}


@pytest.mark.parametrize("text", [r"\074b\076", r"\033[2J", r"\377", r"C:\new\table", "\\"])
def test_linux_gets_backslashes_that_notify_send_shows_as_they_are(text: str) -> None:
    """notify-send replaces escapes of C in the body (g_strcompress of GLib)."""
    body = desktop_command("linux", "title", text).words[-1]
    assert "\\" in body
    assert body.encode().decode("unicode_escape") == text


def test_macos_gets_texts_as_arguments_of_a_fixed_script() -> None:
    words, _ = desktop_command("darwin", "title", EVIL)
    assert words[0] == "osascript"
    assert words[-2:] == ("title", EVIL)
    assert all(EVIL not in word for word in words[:-1])
    assert words[1:7:2] == ("-e", "-e", "-e")


def test_windows_gets_texts_as_variables_of_a_fixed_script() -> None:
    words, variables = desktop_command("win32", "title", EVIL)
    assert words[0] == "powershell.exe"
    assert variables == {"NOTICE_TITLE": "title", "NOTICE_TEXT": EVIL}
    script = base64.b64decode(words[-1]).decode("utf-16-le")
    assert "$env:NOTICE_TEXT" in script
    assert EVIL not in script
    assert words == desktop_command("win32", "other", "other").words


def test_bus_of_the_session_is_named_where_an_agent_lacks_it() -> None:
    bus = {"DBUS_SESSION_BUS_ADDRESS": "unix:path=/run/user/1000/bus"}
    directory = {"XDG_RUNTIME_DIR": "/run/user/1000"}
    assert session_variables(directory, lambda path: path == "/run/user/1000/bus") == bus
    assert session_variables(directory, lambda path: False) == {}
    assert session_variables({**directory, **bus}, lambda path: True) == {}
    assert session_variables({}, lambda path: True) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="puts a program of Linux in place")
@pytest.mark.parametrize("code", [0, 3])
def test_program_of_the_desktop_gets_title_and_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    program = tmp_path / "notify-send"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"json.dump(sys.argv[1:], open({str(tmp_path / 'words')!r}, 'w'))\nsys.exit({code})\n"
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_program("linux") == ""
    result = show(notice(), "linux", os.environ)
    assert result.failure == ("" if code == 0 else "notify-send exited with code 3")
    words = json.loads((tmp_path / "words").read_text())
    assert words[-2:] == ["Barnraise: train-k3f9 failed", "rank 1 on h1 exited with code 1"]


def test_machine_without_the_program_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_program("linux") == "notify-send"
    result = show(notice(), "linux", os.environ)
    assert (result.failure, result.is_final) == ("notify-send is not installed", True)
