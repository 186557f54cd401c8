"""Runs a command of the operating system: the one narrow place, so that tests fake only this."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

NOT_FOUND = 127
TOO_SLOW = 124

# Gives back what came of it, never an error: a missing command has the code 127, a slow one 124.
Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def runner(deadline_s: float) -> Run:
    """Runs each command without input for at most so long."""

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                list(command),
                capture_output=True,
                check=False,
                errors="replace",
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=deadline_s,
            )
        except subprocess.TimeoutExpired:
            return _failed(command, TOO_SLOW, f"no answer within {deadline_s:g} s")
        except OSError as error:
            return _failed(command, NOT_FOUND, error.strerror or str(error))

    return run


def _failed(command: Sequence[str], code: int, why: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(list(command), code, "", f"{command[0]}: {why}")
