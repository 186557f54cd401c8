"""Reading what a peer reports, and writing what it may read. Nothing but ``ProtocolError`` comes out."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from barnraise.collectives.messages import Failure
from barnraise.core.errors import ProtocolError

_T = TypeVar("_T")

_CODES = frozenset({"peer-lost", "operation-timeout", "operation-mismatch", "operation-aborted"})
_MAX_MESSAGE = 2000


def decoded(payload: bytes, kind: type[_T]) -> _T:
    """A structure from a peer's bytes."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (ValueError, RecursionError) as error:  # DecodeError, UnicodeDecodeError, nesting without end
        raise ProtocolError(f"malformed {kind.__name__}") from error


def possible(failure: Failure, world: int) -> bool:
    """Could an honest member of a group of this size have sent it?"""
    ranks = range(world)
    named = failure.peer in ranks or (failure.peer == -1 and failure.code != "peer-lost")
    late = len(failure.late) <= world and all(rank in ranks for rank in failure.late)
    return failure.code in _CODES and named and late


def shortened(failure: Failure) -> Failure:
    """A failure travels in a control frame, whatever a name or a reason in it is made of."""
    return msgspec.structs.replace(failure, message=failure.message[:_MAX_MESSAGE])
