"""``python -m barnraise.cli.services.restart_loop``: start the agent, and again when it failed.

For the Task Scheduler of Windows, which can neither set variables, nor keep a program's words, nor be relied
on to start again what failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from barnraise.core.flow.backoff import Backoff
from barnraise.core.logs.rotation import open_output

_BACKOFF = Backoff(2.0, 60.0)
_HEALTHY_S = 120.0
if sys.platform == "win32":
    _WINDOWLESS = subprocess.CREATE_NO_WINDOW
else:
    _WINDOWLESS = 0


def pause(failures: int) -> float:
    """Return the pause after a number of failures in a row: 2, 4, 8 .. 60 s. Pure."""
    return _BACKOFF.wait(failures - 1)


def keep(
    start: Callable[[], int],
    *,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> int:
    """Restart the agent until it stops without a failure. After a long good run pauses are short again."""
    failures = 0
    while True:
        began = now()
        if start() == 0:
            return 0
        failures = 1 if now() - began >= _HEALTHY_S else failures + 1
        sleep(pause(failures))


def start_once(command: Sequence[str], environment: dict[str, str], log: Path) -> int:
    """Run the agent once and return its exit code. Its output is appended to the log, which is rotated."""
    with open_output(log) as words:
        return subprocess.run(
            list(command),
            check=False,
            creationflags=_WINDOWLESS,
            env=environment,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            stdout=words,
        ).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="barnraise-keeper", description="Keeps this machine's agent running."
    )
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args(arguments)
    settings = dict(entry.partition("=")[::2] for entry in options.set)
    environment = {**os.environ, **settings}
    python = Path(sys.executable)
    if python.name.lower() == "pythonw.exe":
        python = python.with_name("python.exe")
    return keep(lambda: start_once([str(python), "-P", "-m", "barnraise.agent"], environment, options.log))


if __name__ == "__main__":
    sys.exit(main())
