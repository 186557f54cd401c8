"""Warnings of this package in a script's output."""

from __future__ import annotations

import subprocess
import sys

import pytest

from barnraise.core.flow.console_log import split_prefix

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
