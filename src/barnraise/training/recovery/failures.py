"""Failures of a worker: errors that no other group could avoid, and exits that lead to a restart."""

from __future__ import annotations

import logging
import os
import signal
import sys

from barnraise.core.errors import CollectiveError, OperationMismatch, RunError, UnsupportedOperation
from barnraise.core.flow.termination import WINDOWS_KILL_CODE

log = logging.getLogger("barnraise.training")

_SAME_CALLS = (
    "All workers must do the same: a stream must yield equally many items on every machine, every machine "
    "needs the same script and model, and run.gather is called by all of them or by none."
)


def raise_if_permanent(error: CollectiveError | None) -> None:
    """Raise RunError if another group would fail in the same way; ignore lost peers and broken links."""
    if isinstance(error, OperationMismatch):
        raise RunError(error.message, hint=_SAME_CALLS) from error
    if isinstance(error, UnsupportedOperation):
        raise RunError(error.message, hint=error.hint) from error


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and its causes: their frames hold the tensors of the failed step."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def kill_self() -> None:
    """Kill this process, so that the script cannot catch it and the exit does not count as success."""
    sys.stderr.flush()
    os.kill(os.getpid(), getattr(signal, "SIGKILL", WINDOWS_KILL_CODE))  # there it is the exit code


def exit_without_state(*, finished: bool) -> None:
    """Exit a joining worker that cannot get the state; ``finished``: the training is complete."""
    if finished:
        log.warning("the other workers finished before this worker could join them")
    else:
        log.error(
            "no worker with the training state is left; exiting so that the run restarts from a checkpoint"
        )
    kill_self()
