"""How many files and connections this process may have open at once."""

from __future__ import annotations

import contextlib
import sys

_ENOUGH = 65_536
_MACOS = 10_240  # the most there, whatever the hard limit says
_RESERVED = 128  # for the log, libraries, uploads


def raise_limit() -> int | None:
    """To the hard limit, as far as it is of any use: soft ones are low by tradition. None: there is none."""
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    for wanted in (_ENOUGH if hard == unlimited else min(hard, _ENOUGH), _MACOS):
        if soft == unlimited or soft >= wanted:
            break
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return None if soft == unlimited else soft


def connections_within(files: int | None, most: int) -> int:
    """So many at once leave room for all else: each may read a blob at the same time."""
    return most if files is None else max(1, min(most, (files - _RESERVED) // 2))
