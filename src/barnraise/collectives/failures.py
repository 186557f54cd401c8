"""Maps failures that the communication process reports to exceptions. Torch-free."""

from __future__ import annotations

from barnraise.collectives.messages import Failure
from barnraise.core import errors


def to_error(failure: Failure) -> errors.CollectiveError:
    """Return the exception for a failure of a group or an operation."""
    if failure.code == errors.PeerLost.code:
        return errors.PeerLost(failure.peer, failure.message)
    if failure.code == errors.OperationTimeout.code:
        return errors.OperationTimeout(failure.message, late=failure.late)
    kinds: tuple[type[errors.CollectiveError], ...] = (
        errors.OperationMismatch,
        errors.OperationAborted,
        errors.UnsupportedOperation,
        errors.CommProcessLost,
    )
    for kind in kinds:
        if failure.code == kind.code:
            return kind(failure.message)
    return errors.CollectiveError(failure.message)


def to_start_error(failure: Failure) -> errors.BarnraiseError:
    """Return the exception for a communication process that cannot start."""
    kinds: tuple[type[errors.BarnraiseError], ...] = (
        errors.ConfigError,
        errors.IdentityError,
        errors.TransportError,
        errors.HandshakeError,
        errors.ProtocolError,
        errors.ListenerError,
    )
    kind = next((kind for kind in kinds if kind.code == failure.code), errors.CollectiveError)
    return kind(
        f"the communication process cannot start: {failure.message}",
        hint="Fix the reported problem, then start the worker again.",
    )
