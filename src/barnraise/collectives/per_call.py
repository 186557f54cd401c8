"""Options of single calls: what a script sets for the calls in a block. Torch-free.

torch's functions have no argument for these. An option holds in the thread that opened the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import get_args

from barnraise.core.config import TREE_STRATEGIES, Strategy, strategy_name
from barnraise.core.errors import ConfigError

_MAX_ARITY = 64


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of the calls of a block. None: not set there."""

    timeout_s: float | None = None
    strategy: str | None = None
    arity: int | None = None
    tree_below_bytes: int | None = None


_options: ContextVar[CallOptions] = ContextVar("barnraise_call_options", default=CallOptions())


def current_options() -> CallOptions:
    """Return the options of the innermost block of this thread."""
    return _options.get()


@contextmanager
def call_options(
    *,
    timeout: float | timedelta | None = None,
    strategy: str | None = None,
    arity: int | None = None,
    tree_below_bytes: int | None = None,
) -> Iterator[None]:
    """Set options for the operations that this thread calls in the block.

    ``timeout``: of each operation, in seconds. A receive without a message then fails alone, and the group
    continues. ``strategy``: the algorithm, which each operation of the block must have; equal on every rank.
    ``arity``: of its tree. ``tree_below_bytes``: where ``plain`` changes from a tree to a ring.

    Options that are not named stay as in the block around it. A new strategy replaces all three of the
    algorithm.
    """
    options = _options.get()
    if timeout is not None:
        options = replace(options, timeout_s=_checked_timeout(timeout))
    if strategy is not None:
        options = replace(options, strategy=strategy_name(strategy), arity=None, tree_below_bytes=None)
    if arity is not None:
        options = replace(options, arity=arity)
    if tree_below_bytes is not None:
        options = replace(options, tree_below_bytes=tree_below_bytes)
    _check_algorithm(options)
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


def _check_algorithm(options: CallOptions) -> None:
    """Raise ConfigError if an option is wrong or would have no effect."""
    strategy, arity, below = options.strategy, options.arity, options.tree_below_bytes
    if strategy is not None and strategy not in get_args(Strategy):
        raise ConfigError(
            f"the strategy of a call is {strategy!r}, which does not exist",
            hint=f"Use one of: {', '.join(get_args(Strategy))}.",
        )
    if arity is not None and not 2 <= arity <= _MAX_ARITY:
        raise ConfigError(
            f"the arity of a call is {arity}", hint=f"Use a number of children from 2 to {_MAX_ARITY}."
        )
    if arity is not None and strategy not in TREE_STRATEGIES:
        raise ConfigError(
            f"the arity of a call has no effect with the strategy {strategy!r}",
            hint=f"Name one of these strategies, too: {', '.join(sorted(TREE_STRATEGIES))}.",
        )
    if below is not None and (strategy != "plain" or below < 0):
        raise ConfigError(
            f"tree_below_bytes of a call is {below} with the strategy {strategy!r}",
            hint='Use it with strategy="plain" only, and give a number of bytes.',
        )
