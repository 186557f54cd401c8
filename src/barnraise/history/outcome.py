"""State in which a run ended, by the exit code of its record. Pure.

A record has 0 if the run finished, also after a worker's error was forgiven. The failures tell of that, and
`barnraise run` then exits with 3. A 3 in a record is the code of a script, which failed.
"""

from __future__ import annotations

from barnraise.history.view import RunState

_FINISHED, _STOPPED = 0, 130


def end_state(code: int | None, *, was_stopped: bool | None = None) -> RunState:
    """Return the state of a run that ended with this code.

    ``was_stopped``: whether a person stopped it; None: the code tells. A script may exit with that code, too.
    """
    if was_stopped or (was_stopped is None and code == _STOPPED):
        return "stopped"
    return "ended" if code == _FINISHED else "failed"
