"""Failures that the next group would meet with again: they end the worker, with what to do about them."""

from __future__ import annotations

from barnraise.core.errors import CollectiveError, OperationMismatch, RunError, UnsupportedOperation

_ALIKE = (
    "Members must do the same: a stream must yield equally many items on every machine, every machine needs "
    "the same script and model, and run.gather is called by all of them or by none."
)


def raise_if_lasting(error: CollectiveError | None) -> None:
    """RunError for what no other group can do better; nothing for a member that is lost, or a cut line."""
    if isinstance(error, OperationMismatch):
        raise RunError(error.message, hint=_ALIKE) from error
    if isinstance(error, UnsupportedOperation):
        raise RunError(error.message, hint=error.hint) from error
