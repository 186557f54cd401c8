"""Join requests for groups that are not open here yet. Bounded separately for each peer. No I/O."""

from __future__ import annotations

from collections import OrderedDict

from barnraise.collectives.comm_process.decode import decode_peer
from barnraise.collectives.comm_process.group import JoinBody
from barnraise.collectives.messages import Failure
from barnraise.core.errors import ProtocolError
from barnraise.transport.links.frames import FrameHeader, FrameKind

_MAX_GROUPS = 256  # per peer
_MAX_JOIN = 4096


class EarlyJoins:
    """Early joins by worker and tag. A flood of one peer evicts only its own entries."""

    def __init__(self) -> None:
        self._stored: dict[bytes, OrderedDict[int, bytes | Failure]] = {}

    def store(self, worker: bytes, header: FrameHeader, payload: bytes, generation: int) -> JoinBody | None:
        """Store a frame of an unknown group. Return a JOIN of an older generation, which must be rejected."""
        stored = self._stored.setdefault(worker, OrderedDict())
        if header.kind is FrameKind.JOIN:
            if len(payload) > _MAX_JOIN:
                raise ProtocolError(f"a JOIN of {len(payload)} bytes")
            body = decode_peer(payload, JoinBody)
            if body.generation < generation:
                return body
            stored[header.group] = payload
            if len(stored) > _MAX_GROUPS:
                stored.popitem(last=False)
        elif header.kind is FrameKind.FAIL and header.group in stored:
            stored[header.group] = decode_peer(payload, Failure)
        elif header.kind is FrameKind.LEAVE:
            stored.pop(header.group, None)
        return None

    def pop(self, worker: bytes, tag: int) -> bytes | Failure | None:
        """Return the JOIN of this worker for this group, or the failure that it sent."""
        stored = self._stored.get(worker)
        return stored.pop(tag, None) if stored else None

    def forget(self, worker: bytes) -> None:
        self._stored.pop(worker, None)
