"""`barnraise self-test`, as a new user runs it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_proves_what_it_says() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "barnraise.cli.main", "self-test"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("ok  ")]) == 6, done.stdout
    assert "is that of one machine alone" in lines[-2]
