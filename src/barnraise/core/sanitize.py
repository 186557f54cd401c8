"""Sanitizer of text from other machines, before a terminal or a log shows it."""

from __future__ import annotations


def printable(text: str, *, also: str = "", instead: str = "?") -> str:
    """Replace control, invisible and direction characters with ``instead``, except those in ``also``."""
    return "".join(sign if sign.isprintable() or sign in also else instead for sign in text)
