from __future__ import annotations

import os
import subprocess
import sys

import pytest

from barnraise.cli.waiting import run_visibly

WAITS = """
import time
from barnraise.cli.waiting import waiting
with waiting("Looking"):
    time.sleep(2.6)
print("found")
"""
INSTALLS = """
import sys
from barnraise.cli.waiting import run_visibly
program = "import time; print('Progress 1048576 of 4194304', flush=True); time.sleep(1.6); print('x' * 200)"
print(run_visibly((sys.executable, "-c", program), "Installing").code)
"""


def _at_terminal(program: str) -> list[str]:
    """Run a Python program at a pseudo terminal of 80 columns, and return its lines."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "80"},
    ) as process:
        os.close(theirs)
        printed = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux says the end so
                break
            if not part:
                break
            printed += part
        assert process.wait(60) == 0, printed
    os.close(ours)
    return printed.decode().replace("\x1b[K", "").replace("\r\n", "\n").replace("\r", "\n").splitlines()


@pytest.mark.slow
def test_waiting_at_terminal_shows_seconds_and_leaves_empty_line() -> None:
    lines = [line.rstrip() for line in _at_terminal(WAITS)]
    assert "Looking ... 1 s" in lines
    assert "Looking ... 2 s" in lines
    assert lines[-1] == "found", "what was drawn is removed"


@pytest.mark.slow
def test_program_at_terminal_shows_progress_within_width() -> None:
    lines = _at_terminal(INSTALLS)
    assert any(line.startswith("Installing, 1 s: 1 of 4 MiB") for line in lines), lines
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "0"


def test_program_without_terminal_prints_all_lines(capsys: pytest.CaptureFixture[str]) -> None:
    done = run_visibly((sys.executable, "-c", "print('a'); print('b'); raise SystemExit(3)"), "Installing")
    assert done.code == 3
    assert done.tail == "a\nb"
    assert capsys.readouterr().out == "a\nb\n"
