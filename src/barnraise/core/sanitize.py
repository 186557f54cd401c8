"""Sanitizer of text from other machines, before a terminal or a log shows it."""

from __future__ import annotations

import re


def printable(text: str, *, also: str = "", instead: str = "?") -> str:
    """Replace control, invisible and direction characters with ``instead``, except those in ``also``."""
    return "".join(sign if sign.isprintable() or sign in also else instead for sign in text)


_CURSOR_UP = "\x1b[A"
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")


def rewritten_line(text: str) -> str:
    """Return a line as a terminal shows it at its end, without what was overwritten after carriage returns.

    Movements of the cursor are removed, colours are kept.
    """
    return _CURSOR.sub("", text.rstrip("\r").rpartition("\r")[2])


def rewritten_text(text: str) -> str:
    """Return the lines of an output as a terminal shows them at its end.

    A progress bar below another one moves the cursor up after each change: it stays one line.
    """
    return "\n".join(map(rewritten_line, text.replace(f"{_CURSOR_UP}\n", "").split("\n")))
