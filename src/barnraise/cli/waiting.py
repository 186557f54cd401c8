"""Line at a terminal that shows what a command waits for, redrawn each second. Light to import."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from barnraise.cli.runs.progress.live_line import LiveLines, cut, is_live_terminal, terminal_columns

_REDRAW_S = 0.5
_FIRST_S = 1.0  # a shorter wait shows nothing
_KEPT_LINES = 40


class Finished(NamedTuple):
    """Exit code of a program, and the end of its output."""

    code: int
    tail: str


@contextmanager
def waiting(text: str | Callable[[float], str]) -> Iterator[None]:
    """Show the text and the seconds while the block runs. A function gets the seconds and returns the line.

    The line is drawn at a terminal only, and removed at the end.
    """
    if not is_live_terminal():
        yield
        return
    live = LiveLines()
    begin = time.monotonic()
    ended = threading.Event()

    def line() -> str:
        seconds = time.monotonic() - begin
        return text(seconds) if callable(text) else f"{text} ... {seconds:.0f} s"

    def redraw() -> None:
        pause = _FIRST_S
        while not ended.wait(pause):
            live.draw([cut(line(), terminal_columns() - 1)])
            pause = _REDRAW_S

    thread = threading.Thread(target=redraw, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        live.erase()


def run_visibly(command: Sequence[str], what: str) -> Finished:
    """Run a program to its end; at a terminal show its newest line and the time, elsewhere all its lines."""
    newest = ""
    tail: deque[str] = deque(maxlen=_KEPT_LINES)
    with subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        with waiting(lambda seconds: f"{what}, {seconds:.0f} s: {newest}"):
            for line in process.stdout:
                tail.append(line.rstrip())
                newest = _shortened(line) or newest
                if not is_live_terminal():
                    sys.stdout.write(line)
                    sys.stdout.flush()
            code = process.wait()
    return Finished(code, "\n".join(tail))


def _shortened(line: str) -> str:
    """Return a line of pip as people want it: "Progress 1048576 of 4194304" becomes "1 of 4 MiB"."""
    words = line.split()
    if len(words) == 4 and words[0] == "Progress" and words[1].isdigit() and words[3].isdigit():
        done, total = (int(number) / 2**20 for number in (words[1], words[3]))
        return f"{done:.0f} of {total:.0f} MiB"
    return line.strip()
