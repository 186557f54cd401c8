"""One group as its mover sees it: who joined, what was measured, which operations run. No I/O."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from backyard.collectives.costs import CostTable
from backyard.collectives.messages import Failure, OpenGroup
from backyard.collectives.mover.execution import Execution
from backyard.collectives.mover.parcels import Parcels
from backyard.core.errors import ProtocolError
from backyard.transport.frames import EAGER_BYTES

EARLY_OPERATIONS = 32  # how far a rank may send small data ahead of a peer that has not started
_MAX_EARLY_BYTES = 4 * EARLY_OPERATIONS * EAGER_BYTES
_MAX_EARLY_STARTS = 65536


class JoinBody(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of a group when it enters; all but ``rank`` must be equal everywhere."""

    generation: int
    name: str
    rank: int
    world: int
    membership: bytes


def membership_digest(members: tuple[bytes, ...]) -> bytes:
    return hashlib.sha256(b"".join(members)).digest()[:16]


def group_tag(run: str, generation: int, name: str) -> int:
    """The number that stands for a group on the wire; never 0, which is the link itself."""
    text = f"{len(run)}:{run}/{generation}/{name}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") or 1


@dataclass(slots=True)
class Early:
    """What a peer sent for an operation that this rank has not started."""

    encoded: bytes | None = None
    messages: list[tuple[int, bytes]] = field(default_factory=list)


class Started:
    """Which sequence numbers have been started here. Pieces of two operations may start in either order."""

    def __init__(self) -> None:
        self._below = 0  # everything under this has been
        self._above: set[int] = set()

    def add(self, sequence: int) -> None:
        self._above.add(sequence)
        while self._below in self._above:
            self._above.discard(self._below)
            self._below += 1

    def __contains__(self, sequence: int) -> bool:
        return sequence < self._below or sequence in self._above


@dataclass(slots=True)
class Group:
    """State of one group; ``failure`` set means that it is over for good."""

    tag: int
    command: OpenGroup
    parcels: Parcels
    deadline: float
    joined: set[int] = field(default_factory=set)
    measures: dict[int, CostTable] = field(default_factory=dict)
    table: CostTable | None = None
    opened: bool = False
    failure: Failure | None = None
    running: dict[int, Execution] = field(default_factory=dict)
    started: Started = field(default_factory=Started)
    recent: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=64))
    peer_started: dict[int, int] = field(default_factory=dict)
    early: dict[tuple[int, int], Early] = field(default_factory=dict)
    early_bytes: dict[int, int] = field(default_factory=dict)
    measured: bool = False
    agreed: bool = False  # the table is rank 0's

    @property
    def rank(self) -> int:
        return self.command.rank

    @property
    def world(self) -> int:
        return len(self.command.members)

    @property
    def workers(self) -> tuple[bytes, ...]:
        return tuple(member.worker for member in self.command.members)

    def others(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]

    def rank_of(self, worker: bytes) -> int | None:
        workers = self.workers
        return workers.index(worker) if worker in workers else None

    def join_body(self) -> bytes:
        return msgspec.msgpack.encode(
            JoinBody(
                self.command.generation,
                self.command.name,
                self.rank,
                self.world,
                membership_digest(self.workers),
            )
        )

    def check_join(self, body: JoinBody, peer: int) -> str | None:
        """Why this peer's idea of the group is not ours; None when it is."""
        if (body.generation, body.name) != (self.command.generation, self.command.name):
            return f"rank {peer} calls it {body.name!r} of generation {body.generation}"
        if body.rank != peer or body.world != self.world:
            return f"it says it is rank {body.rank} of {body.world}, here it is rank {peer} of {self.world}"
        if body.membership != membership_digest(self.workers):
            return f"rank {peer} has another list of members"
        return None

    def may_send_early(self, sequence: int) -> Callable[[int], bool]:
        return lambda peer: sequence <= self.peer_started.get(peer, -1) + EARLY_OPERATIONS

    def keep_start(self, peer: int, sequence: int, encoded: bytes) -> None:
        if len(self.early) >= _MAX_EARLY_STARTS:
            raise ProtocolError("a peer announced too many operations ahead")
        self.early.setdefault((peer, sequence), Early()).encoded = encoded

    def keep_data(self, peer: int, sequence: int, ordinal: int, payload: bytes) -> None:
        held = self.early_bytes.get(peer, 0) + len(payload)
        if held > _MAX_EARLY_BYTES or len(self.early) >= _MAX_EARLY_STARTS:
            raise ProtocolError("a peer sent too much ahead")
        self.early_bytes[peer] = held
        self.early.setdefault((peer, sequence), Early()).messages.append((ordinal, payload))

    def take_early(self, peer: int, sequence: int) -> Early | None:
        early = self.early.pop((peer, sequence), None)
        if early is not None:
            self.early_bytes[peer] = self.early_bytes.get(peer, 0) - sum(len(p) for _, p in early.messages)
        return early
