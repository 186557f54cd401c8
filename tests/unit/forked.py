"""Forked processes as members of a group, so that torch is imported once."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable


def fork_all(members: Iterable[Callable[[], None]]) -> int:
    """Run all members in forked processes; return 0 if each succeeds. Print errors."""
    children = []
    for member in members:
        child = os.fork()
        if child == 0:
            try:
                member()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(1)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)
