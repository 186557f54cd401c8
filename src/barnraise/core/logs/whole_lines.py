"""Standard output by whole lines, so that lines of several threads and processes do not mix."""

from __future__ import annotations

import io
import sys


def write_whole_lines() -> None:
    """Write each line of standard output with one call of the system.

    An unbuffered output writes each argument of ``print`` by itself. A line of our log, or of another
    process, could then stand in the middle of the script's line.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
