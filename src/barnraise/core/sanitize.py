"""What others say, before a person sees it: none of it may command a terminal, or begin a line of a log."""

from __future__ import annotations


def printable(text: str, *, also: str = "", instead: str = "?") -> str:
    """Without signs that command, hide or turn around what follows; those of ``also`` may stay."""
    return "".join(sign if sign.isprintable() or sign in also else instead for sign in text)
