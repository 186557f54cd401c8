"""Options of single calls: what a script sets for the calls in a block. Torch-free.

torch's functions have no argument for these. An option holds in the thread that opened the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta

from barnraise.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of the calls of a block. None: not set there."""

    timeout_s: float | None = None


_options: ContextVar[CallOptions] = ContextVar("barnraise_call_options", default=CallOptions())


def current_options() -> CallOptions:
    """Return the options of the innermost block of this thread."""
    return _options.get()


@contextmanager
def call_options(*, timeout: float | timedelta | None = None) -> Iterator[None]:
    """Set options for the operations that this thread calls in the block.

    ``timeout``: of each operation, in seconds. A receive without a message then fails alone, and the group
    continues. Options that are not named stay as in the block around it.
    """
    options = _options.get()
    if timeout is not None:
        options = replace(options, timeout_s=_checked_timeout(timeout))
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)


def _checked_timeout(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < float("inf"):
        raise ConfigError(
            f"the timeout of a call is {seconds:g} s", hint="Give a positive number of seconds, or none."
        )
    return seconds
