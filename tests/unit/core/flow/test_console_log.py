"""Warnings of this package in a script's output."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from barnraise.core.flow.console_log import LogFormatter, split_prefix

SCRIPT = """
import logging
from barnraise.core.flow.console_log import install_console_log

{setup}
install_console_log()
install_console_log()
logging.getLogger("barnraise.training").warning("pc is %s", "slow")
logging.getLogger("barnraise.training").info("not shown")
"""


@pytest.mark.parametrize(
    ("setup", "printed"),
    [("", "barnraise: pc is slow\n"), ('logging.basicConfig(format="[%(message)s]")', "[pc is slow]\n")],
)
def test_warning_is_printed_once_with_prefix_or_by_the_scripts_handler(setup: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(setup=setup)], capture_output=True, text=True, check=True
    )
    assert done.stderr == printed


def test_split_prefix_recognises_our_lines() -> None:
    assert split_prefix("barnraise: pc is slow") == (True, "pc is slow")
    assert split_prefix("epoch 1") == (False, "epoch 1")


def test_quoted_text_commands_no_terminal_and_makes_no_line_in_a_log() -> None:
    """A peer's text holds a clipboard write and a forged line of the log."""
    record = logging.LogRecord(
        "barnraise", logging.WARNING, "", 0, "it said %s", ("\x1b]52;c;eA==\x07\nINFO ok",), None
    )
    assert LogFormatter("%(levelname)s %(message)s").format(record) == "WARNING it said ?]52;c;eA==??INFO ok"


def test_traceback_keeps_its_lines_in_a_log() -> None:
    try:
        raise ValueError("bad \x1b[2J")
    except ValueError:
        record = logging.LogRecord("barnraise", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    lines = LogFormatter().format(record).splitlines()
    assert lines[0] == "failed"
    assert lines[1].startswith("Traceback")
    assert lines[-1] == "ValueError: bad ?[2J"
