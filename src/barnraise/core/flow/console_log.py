"""Logs: warnings of this package in a script's output, with ``barnraise:`` in front, and logs of daemons."""

from __future__ import annotations

import logging
import sys
from typing import Any

from barnraise.core.sanitize import printable

_PREFIX = "barnraise: "


class LogFormatter(logging.Formatter):
    """Format of a log in which text of other machines commands no terminal and makes no line of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # the name is the library's
        """Return the line of a record."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # the name is the library's
        """Return the traceback of a record."""
        return printable(super().formatException(ei), also="\n\t")


def install_process_log(
    level: int | str = logging.INFO, form: str = "%(asctime)s %(levelname)s %(message)s"
) -> None:
    """Write the log of this process to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])


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
        handler = _ConsoleHandler(logging.WARNING)
        handler.setFormatter(LogFormatter())
        logger.addHandler(handler)


def split_prefix(line: str) -> tuple[bool, str]:
    """Return whether a line of a script's output is of this package, and the line without our prefix."""
    return line.startswith(_PREFIX), line.removeprefix(_PREFIX)
