"""Warnings of this package in a script's output: each line begins with ``barnraise:``."""

from __future__ import annotations

import logging
import sys

_PREFIX = "barnraise: "


class _ConsoleHandler(logging.Handler):
    """Writes to stderr, unless the script has configured logging; then the script's handlers write."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            sys.stderr.write(f"{_PREFIX}{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001  # as every handler of the standard library
            self.handleError(record)


def install_console_log() -> None:
    """Show the warnings of this package with its name in front. Calling it again does nothing."""
    logger = logging.getLogger("barnraise")
    if not any(isinstance(handler, _ConsoleHandler) for handler in logger.handlers):
        logger.addHandler(_ConsoleHandler(logging.WARNING))


def split_prefix(line: str) -> tuple[bool, str]:
    """Return whether a line of a script's output is of this package, and the line without our prefix."""
    return line.startswith(_PREFIX), line.removeprefix(_PREFIX)
