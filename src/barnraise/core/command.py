"""Runner of operating system commands. It is the one place that tests replace."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence

NOT_FOUND = 127
TOO_SLOW = 124

# Never raises: a command that is missing has the exit code 127, and one that times out 124.
Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def runner(deadline_s: float | None, environment: Mapping[str, str] | None = None) -> Run:
    """Return a function that runs a command without input, for at most ``deadline_s`` seconds.

    ``environment``: the command's environment variables; None for those of this process. ``deadline_s``: None
    for no limit.
    """

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                list(command),
                capture_output=True,
                check=False,
                env=environment,
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
