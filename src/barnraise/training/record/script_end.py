"""End of a script, for the record of a run without an agent.

Python tells functions that it calls at the exit neither the code nor the error, so both are noted before.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import NoReturn

from barnraise.agent_client.run_requests import STOPPED
from barnraise.history.entries import RunEnd

_MOST_CODE = 0xFF


class ScriptEnd:
    """End of this script: the last status that it gave `sys.exit`, or the error that nothing has caught.

    Errors before this object was made do not count. Nor do those of an interactive session, which goes on.
    """

    def __init__(self) -> None:
        self.status: object = None
        self._earlier = getattr(sys, "last_value", None)
        _statuses.tell(self)

    def entry(self, at: float) -> RunEnd:
        """Return the end of the run. If it is the last one open, `sys.exit` is as it was before."""
        _statuses.forget(self)
        if hasattr(sys, "ps1"):
            return RunEnd(at, 0)
        error = getattr(sys, "last_value", None)
        if error is None or error is self._earlier:
            code = exit_code(self.status)
            return RunEnd(at, code, f"the script exited with code {code}" if code else "")
        if isinstance(error, KeyboardInterrupt):
            return RunEnd(at, STOPPED, "it was interrupted from the keyboard")
        return RunEnd(at, 1, f"the script failed: {type(error).__name__}")


class _ExitStatuses:
    """One replacement of `sys.exit` for all open records.

    A process may open thousands of records and close them in any order, so they are no chain of replacements.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakSet[ScriptEnd] = weakref.WeakSet()
        self._original: Callable[..., NoReturn] | None = None

    def tell(self, end: ScriptEnd) -> None:
        self._open.add(end)
        if self._original is None:
            self._original, sys.exit = sys.exit, self._note

    def forget(self, end: ScriptEnd) -> None:
        self._open.discard(end)
        # A later replacement by another package calls this one, which therefore stays.
        if not self._open and self._original is not None and sys.exit == self._note:
            sys.exit, self._original = self._original, None

    def _note(self, status: str | int | None = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            for end in list(self._open):
                end.status = status
        assert self._original is not None
        self._original(status)


_statuses = _ExitStatuses()


def exit_code(status: object) -> int:
    """Return the code with which Python exits for a status of `sys.exit`."""
    if status is None:
        return 0
    return status & _MOST_CODE if isinstance(status, int) else 1
