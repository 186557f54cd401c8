"""Lines at the bottom of a terminal that are redrawn in place, below the lines that were printed."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import click

from barnraise.cli.terminal import is_terminal

_COLUMNS = 80


def is_live_terminal() -> bool:
    """Tell whether stderr is a terminal that can move its cursor."""
    return is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"


def terminal_columns() -> int:
    """Return the columns of the terminal that stderr is; 80 if unknown."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS


def cut(text: str, width: int) -> str:
    """Return the text cut to the width; a wide character takes two columns."""
    columns = 0
    for place, sign in enumerate(text):
        columns += 2 if unicodedata.east_asian_width(sign) in "WF" else 1
        if columns > width:
            return text[:place]
    return text


@dataclass
class LiveLines:
    """The redrawn lines on stderr. Call `erase` before anything is printed, and `draw` afterwards.

    Each line must be shorter than the terminal is wide.
    """

    drawn: tuple[str, ...] = ()

    def erase(self) -> None:
        """Remove the lines; the cursor is then where the next line is printed."""
        if self.drawn:
            click.echo("\r\x1b[K" + "\x1b[A\x1b[K" * (len(self.drawn) - 1), nl=False, err=True, color=True)
            self.drawn = ()

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines in place of the last ones."""
        if tuple(lines) != self.drawn:
            self.erase()
            click.echo("\n".join(lines), nl=False, err=True)
            self.drawn = tuple(lines)
