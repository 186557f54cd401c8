"""Network levels of ``barnraise run --levels`` for groups of torch.distributed.

Such a group has no sites, no codecs and no rounds, so only the algorithms of ``[inside]`` apply to it.
"""

from __future__ import annotations

import os
import sys

from barnraise.core.errors import ConfigError
from barnraise.planning.inputs.levels import OPEN, VARIABLE, Levels, decode_levels
from barnraise.runs.backend_choice import OURS

_SYNC_VARIABLE = "BARNRAISE_SYNC"
_SESSION = "barnraise.training.session"


def levels_of_run() -> Levels:
    """Return the levels that the run fixes, or open ones."""
    return decode_levels(os.environ.get(VARIABLE, ""))


def check_run_levels(backend: str, world: int) -> None:
    """Raise ConfigError if an option of the run would have no effect on the default group of a script.

    A script that has imported the session gets the options there.
    """
    if _SESSION not in sys.modules and world > 1:
        check_levels(levels_of_run(), os.environ.get(_SYNC_VARIABLE, ""), backend)


def check_levels(levels: Levels, sync: str, backend: str) -> None:
    """Raise ConfigError if an option would have no effect on a group of this backend."""
    if sync == "auto":
        raise ConfigError(
            "--sync auto has no effect on groups of torch.distributed: only a session chooses codecs and "
            "rounds",
            hint="Leave it out, or train in a session (docs/session.md).",
        )
    if levels == OPEN:
        return
    if backend != OURS:
        raise ConfigError(
            f"--levels has no effect on this group, which uses {backend}",
            hint=f"Add `--engine {OURS}`, or leave out --levels.",
        )
    if not levels.across.is_open:
        raise ConfigError(
            "[across] of --levels has no effect on groups of torch.distributed, which know no sites",
            hint="Fix the algorithms in [inside], which holds for all machines of such a group.",
        )
    if levels != levels.exact():
        raise ConfigError(
            "the codec or the period in [inside] of --levels has no effect on groups of torch.distributed",
            hint="Remove them, or train in a session (docs/session.md).",
        )
