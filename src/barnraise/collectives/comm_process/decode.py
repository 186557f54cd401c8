"""Decoding of peers' reports, and limits on our own. Decoding raises only ``ProtocolError``."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from barnraise.collectives.messages import Failure
from barnraise.core.errors import ProtocolError

_T = TypeVar("_T")

_CODES = frozenset({"peer-lost", "operation-timeout", "operation-mismatch", "operation-aborted"})
_MAX_MESSAGE = 2000


def decode_peer(payload: bytes, kind: type[_T]) -> _T:
    """Decode a structure from a peer's bytes."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (ValueError, RecursionError) as error:  # DecodeError, UnicodeDecodeError, nesting without end
        raise ProtocolError(f"malformed {kind.__name__}") from error


def is_plausible(failure: Failure, world: int) -> bool:
    """Return True if an honest member of a group of this size could have sent this failure."""
    ranks = range(world)
    format_label = failure.peer in ranks or (failure.peer == -1 and failure.code != "peer-lost")
    late = len(failure.late) <= world and all(rank in ranks for rank in failure.late)
    return failure.code in _CODES and format_label and late


def truncate_failure(failure: Failure) -> Failure:
    """Cut the message of a failure so that it fits a control frame."""
    return msgspec.structs.replace(failure, message=failure.message[:_MAX_MESSAGE])
