"""The exceptions that stand for what a mover reports. Torch-free."""

from __future__ import annotations

from barnraise.collectives.messages import Failure
from barnraise.core import errors


def error_of(failure: Failure) -> errors.CollectiveError:
    """The exception that stands for a failure."""
    if failure.code == errors.PeerLost.code:
        return errors.PeerLost(failure.peer, failure.message)
    if failure.code == errors.OperationTimeout.code:
        return errors.OperationTimeout(failure.message, late=failure.late)
    kinds: tuple[type[errors.CollectiveError], ...] = (
        errors.OperationMismatch,
        errors.OperationAborted,
        errors.UnsupportedOperation,
        errors.MoverLost,
    )
    for kind in kinds:
        if failure.code == kind.code:
            return kind(failure.message)
    return errors.CollectiveError(failure.message)


def refusal_of(failure: Failure) -> errors.BarnraiseError:
    """The exception that stands for a mover which cannot serve."""
    kinds: tuple[type[errors.BarnraiseError], ...] = (
        errors.ConfigError,
        errors.IdentityError,
        errors.TransportError,
        errors.HandshakeError,
        errors.ProtocolError,
        errors.ListenerError,
    )
    kind = next((kind for kind in kinds if kind.code == failure.code), errors.CollectiveError)
    return kind(f"the mover cannot serve: {failure.message}", hint="Do as it says, then start again.")
