"""What peers said of groups that are not open here yet. Bounded for each peer alone. No I/O."""

from __future__ import annotations

from collections import OrderedDict

from barnraise.collectives.comm_process.decode import decoded
from barnraise.collectives.comm_process.group import JoinBody
from barnraise.collectives.messages import Failure
from barnraise.core.errors import ProtocolError
from barnraise.transport.links.frames import FrameHeader, FrameKind

_REMEMBERED = 256  # groups of one peer
_MAX_JOIN = 4096


class EarlyJoins:
    """The beginnings of groups, by worker and tag; a peer's flood pushes out nothing but its own."""

    def __init__(self) -> None:
        self._kept: dict[bytes, OrderedDict[int, bytes | Failure]] = {}

    def keep(self, worker: bytes, header: FrameHeader, payload: bytes, generation: int) -> JoinBody | None:
        """Take in a frame of an unknown group; a JOIN of an older generation comes back, to be refused."""
        kept = self._kept.setdefault(worker, OrderedDict())
        if header.kind is FrameKind.JOIN:
            if len(payload) > _MAX_JOIN:
                raise ProtocolError(f"a JOIN of {len(payload)} bytes")
            body = decoded(payload, JoinBody)
            if body.generation < generation:
                return body
            kept[header.group] = payload
            if len(kept) > _REMEMBERED:
                kept.popitem(last=False)
        elif header.kind is FrameKind.FAIL and header.group in kept:
            kept[header.group] = decoded(payload, Failure)
        elif header.kind is FrameKind.LEAVE:
            kept.pop(header.group, None)
        return None

    def take(self, worker: bytes, tag: int) -> bytes | Failure | None:
        """The JOIN of this worker for this group, or why it gave the group up."""
        kept = self._kept.get(worker)
        return kept.pop(tag, None) if kept else None

    def forget(self, worker: bytes) -> None:
        self._kept.pop(worker, None)
