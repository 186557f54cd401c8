"""Operating system commands: output, environment, and failures as exit codes."""

from __future__ import annotations

import os
import sys

from barnraise.core.command import NOT_FOUND, TOO_SLOW, runner


def test_runner_returns_output_and_exit_code() -> None:
    done = runner(60.0)([sys.executable, "-c", "import sys; print('out'); sys.exit('why')"])
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (1, "out", "why")


def test_runner_passes_environment() -> None:
    environment = {**os.environ, "NAME": "value"}
    done = runner(None, environment)([sys.executable, "-c", "import os; print(os.environ['NAME'])"])
    assert done.stdout.strip() == "value"


def test_runner_reports_missing_and_slow_commands_as_exit_codes() -> None:
    missing = runner(60.0)(["no-such-command-of-ours"])
    assert missing.returncode == NOT_FOUND
    assert missing.stderr.startswith("no-such-command-of-ours: ")
    slow = runner(0.2)([sys.executable, "-c", "import time; time.sleep(60)"])
    assert slow.returncode == TOO_SLOW
    assert "no answer within 0.2 s" in slow.stderr
