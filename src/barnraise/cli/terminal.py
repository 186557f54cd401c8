"""Abilities of the terminal: its width, colours, and a picture that is drawn again in its place."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import TextIO

import click

from barnraise.core.sanitize import printable

_UNKNOWN = (80, 24)
_NARROWEST = 40


def columns() -> int:
    """Return the width of the terminal; 80 if the output goes elsewhere and COLUMNS is not set."""
    return max(_NARROWEST, shutil.get_terminal_size(_UNKNOWN).columns)


def is_terminal(stream: TextIO) -> bool:
    """Return True if a person may read or type there. On Windows the null device looks like a terminal."""
    if not stream.isatty():
        return False
    if sys.platform == "win32":
        import ctypes
        import msvcrt

        mode = ctypes.c_uint32()
        handle = ctypes.c_void_p(msvcrt.get_osfhandle(stream.fileno()))
        return bool(ctypes.windll.kernel32.GetConsoleMode(handle, ctypes.byref(mode)))
    return True


def shows_colour(stream: TextIO) -> bool:
    """Tell whether colours are wanted there: only at a terminal, and never with NO_COLOR."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(
    text: str, *, colour: str | None = None, bold: bool = False, dim: bool = False, err: bool = False
) -> str:
    """Return the text with the codes of a style, if standard output (``err``: standard error) shows them."""
    if not shows_colour(sys.stderr if err else sys.stdout):
        return text
    return click.style(text, fg=colour, bold=bold or None, dim=dim or None)


def wrapped(text: str, width: int = 0, indent: str = "") -> str:
    """Return a sentence in lines that fit; ``indent`` comes before all but the first.

    The sentence may quote another machine, so that nothing in it commands the terminal.
    """
    return textwrap.fill(
        printable(text, also="\n\t"),
        width or columns(),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def read_secret(given: str, name: str) -> str:
    """Return a secret that the command line gives; for ``-`` ask for it, or read a line of standard input.

    The process list and the shell's history show the words of a command line, and not what is read here.
    """
    if given != "-":
        return given
    if is_terminal(sys.stdin):
        return str(click.prompt(name, hide_input=True, err=True)).strip()
    return sys.stdin.readline().strip()


def redraw(text: str, lines_before: int) -> None:
    """Draw a picture over the one before, which had ``lines_before`` lines."""
    back_and_clear = f"\x1b[{lines_before}F\x1b[J" if lines_before else ""
    sys.stdout.write(f"{back_and_clear}{text}\n")
    sys.stdout.flush()
