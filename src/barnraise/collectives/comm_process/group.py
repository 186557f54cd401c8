"""One group as its mover sees it: who joined, what was measured, which operations run. No I/O."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.comm_process.execution import Execution
from barnraise.collectives.comm_process.point_to_point import PointToPoint
from barnraise.collectives.messages import Failure, OpenGroup
from barnraise.core.errors import ProtocolError
from barnraise.transport.links.frames import EAGER_BYTES

# What a rank may have waiting at a peer for operations that the peer has not started. Sender and receiver
# count alike, so an honest sender never goes beyond it.
_MAX_EARLY_BYTES = 128 * EAGER_BYTES
_EARLY_OVERHEAD = 64  # of each message, so that empty ones are bounded too
_MAX_EARLY_STARTS = 65536
_MAX_EARLY_START_BYTES = 16 << 20


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
class EarlyFrame:
    """What a peer sent for an operation that this rank has not started."""

    encoded: bytes | None = None
    messages: list[tuple[int, bytes]] = field(default_factory=list)


class StartedOperation:
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
    parcels: PointToPoint
    deadline: float
    joined: set[int] = field(default_factory=set)
    measures: dict[int, CostTable] = field(default_factory=dict)
    table: CostTable | None = None
    opened: bool = False
    failure: Failure | None = None
    running: dict[int, Execution] = field(default_factory=dict)
    started: StartedOperation = field(default_factory=StartedOperation)
    recent: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=64))
    early: dict[tuple[int, int], EarlyFrame] = field(default_factory=dict)
    early_bytes: dict[int, int] = field(default_factory=dict)  # by peer, what it has waiting here
    early_start_bytes: dict[int, int] = field(default_factory=dict)
    early_sent: dict[tuple[int, int], int] = field(default_factory=dict)  # what we have waiting there
    early_sent_bytes: dict[int, int] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)  # closed the group when all their operations were done
    told: Failure | None = None  # what the others heard of our failure
    refused: bool = False  # it never opened; kept until its deadline to answer those that come late
    measured: bool = False
    agreed: bool = False  # the table is rank 0's

    workers: tuple[bytes, ...] = ()  # by rank
    _ranks: dict[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.workers = tuple(member.worker for member in self.command.members)
        self._ranks = {worker: rank for rank, worker in enumerate(self.workers)}

    @property
    def rank(self) -> int:
        return self.command.rank

    @property
    def world(self) -> int:
        return len(self.command.members)

    def others(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]

    def rank_of(self, worker: bytes) -> int | None:
        return self._ranks.get(worker)

    def awaits(self, rank: int) -> bool:
        """Are bytes still to come from this rank, or to go to it?"""
        running = any(rank in execution.awaited() for execution in self.running.values())
        sending = any(out.command.peer == rank for out in self.parcels.sending.values())
        return running or sending or any(source == rank for source, _ in self.parcels.receiving)

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

    def not_opened(self) -> Failure:
        """Whom it waited for in vain."""
        missing = [rank for rank in self.others() if rank not in self.joined]
        names = ", ".join(f"rank {rank}" for rank in missing) or "rank 0 (cost table)"
        message = f"{names} did not enter the group within {self.command.timeout_s:g} s"
        return Failure("operation-timeout", message, late=tuple(missing))

    def may_send_early(self, sequence: int) -> Callable[[int, int], bool]:
        """Asked before bytes go to a peer that has not said it started; a yes counts them."""

        def may(peer: int, nbytes: int) -> bool:
            charge = nbytes + _EARLY_OVERHEAD
            total = self.early_sent_bytes.get(peer, 0) + charge
            if total > _MAX_EARLY_BYTES:
                return False
            self.early_sent_bytes[peer] = total
            self.early_sent[peer, sequence] = self.early_sent.get((peer, sequence), 0) + charge
            return True

        return may

    def peer_started(self, peer: int, sequence: int) -> None:
        """What we sent it ahead for this operation does not wait there any more."""
        charge = self.early_sent.pop((peer, sequence), 0)
        if charge:
            self.early_sent_bytes[peer] -= charge

    def announced(self, peer: int, sequence: int) -> bool:
        """Has a peer said that it started an operation which this rank has not?"""
        early = self.early.get((peer, sequence))
        return early is not None and early.encoded is not None

    def called(self, sequence: int) -> bytes:
        """What this rank called under that number, as long as it is remembered; else nothing."""
        return next((encoded for number, encoded in reversed(self.recent) if number == sequence), b"")

    def keep_start(self, peer: int, sequence: int, encoded: bytes) -> None:
        held = self.early_start_bytes.get(peer, 0) + len(encoded)
        if held > _MAX_EARLY_START_BYTES or len(self.early) >= _MAX_EARLY_STARTS:
            raise ProtocolError("a peer announced too many operations ahead")
        early = self.early.setdefault((peer, sequence), EarlyFrame())
        if early.encoded is not None:
            raise ProtocolError(f"operation {sequence} was started twice")
        early.encoded = encoded
        self.early_start_bytes[peer] = held

    def keep_data(self, peer: int, sequence: int, ordinal: int, payload: bytes) -> None:
        held = self.early_bytes.get(peer, 0) + len(payload) + _EARLY_OVERHEAD
        if held > _MAX_EARLY_BYTES or len(self.early) >= _MAX_EARLY_STARTS:
            raise ProtocolError("a peer sent too much ahead")
        self.early_bytes[peer] = held
        self.early.setdefault((peer, sequence), EarlyFrame()).messages.append((ordinal, payload))

    def take_early(self, peer: int, sequence: int) -> EarlyFrame | None:
        early = self.early.pop((peer, sequence), None)
        if early is not None:
            held = sum(len(payload) + _EARLY_OVERHEAD for _, payload in early.messages)
            self.early_bytes[peer] = self.early_bytes.get(peer, 0) - held
            started = len(early.encoded or b"")
            self.early_start_bytes[peer] = self.early_start_bytes.get(peer, 0) - started
        return early
