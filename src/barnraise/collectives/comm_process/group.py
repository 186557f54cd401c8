"""State of one group in the communication process: members, measurements, running operations. No I/O."""

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

# Limit of bytes that wait at a peer for operations it has not started. Sender and receiver count alike, so
# an honest sender never exceeds it.
_MAX_EARLY_BYTES = 128 * EAGER_BYTES
_EARLY_OVERHEAD = 64  # of each message, so that empty ones are bounded too
_MAX_EARLY_STARTS = 65536
_MAX_EARLY_START_BYTES = 16 << 20


class JoinBody(msgspec.Struct, frozen=True, array_like=True):
    """Description of a group that a joining rank sends. All fields but ``rank`` must be equal everywhere."""

    generation: int
    name: str
    rank: int
    world: int
    membership: bytes


def membership_digest(members: tuple[bytes, ...]) -> bytes:
    return hashlib.sha256(b"".join(members)).digest()[:16]


def group_tag(run: str, generation: int, name: str) -> int:
    """Return the number of a group on the wire. It is never 0, which means the link itself."""
    text = f"{len(run)}:{run}/{generation}/{name}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") or 1


@dataclass(slots=True)
class EarlyMessages:
    """Frames of a peer for an operation that this rank has not started."""

    encoded: bytes | None = None
    messages: list[tuple[int, bytes]] = field(default_factory=list)


class StartedSequences:
    """Set of sequence numbers that were started here. Chunks of two operations may start in either order."""

    def __init__(self) -> None:
        self._all_below = 0  # every lower number was started
        self._above: set[int] = set()

    def add(self, sequence: int) -> None:
        self._above.add(sequence)
        while self._all_below in self._above:
            self._above.discard(self._all_below)
            self._all_below += 1

    def __contains__(self, sequence: int) -> bool:
        return sequence < self._all_below or sequence in self._above


@dataclass(slots=True)
class Group:
    """State of one group; ``failure`` is set when the group has failed for good."""

    tag: int
    command: OpenGroup
    point_to_point: PointToPoint
    deadline: float
    joined: set[int] = field(default_factory=set)
    measures: dict[int, CostTable] = field(default_factory=dict)
    table: CostTable | None = None
    opened: bool = False
    failure: Failure | None = None
    running: dict[int, Execution] = field(default_factory=dict)
    started: StartedSequences = field(default_factory=StartedSequences)
    recent: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=64))
    early: dict[tuple[int, int], EarlyMessages] = field(default_factory=dict)
    early_bytes: dict[int, int] = field(default_factory=dict)  # by peer: its bytes that wait here
    early_start_bytes: dict[int, int] = field(default_factory=dict)
    early_sent: dict[tuple[int, int], int] = field(default_factory=dict)  # our bytes that wait there
    early_sent_bytes: dict[int, int] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)  # ranks that closed the group after their last operation
    reported_failure: Failure | None = None  # as sent to the other ranks
    refused: bool = False  # it never opened; kept until its deadline to reply to late joins
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

    def waits_for(self, rank: int) -> bool:
        """Return True if bytes from or to this rank are missing."""
        running = any(rank in execution.missing_ranks() for execution in self.running.values())
        sending = any(out.command.peer == rank for out in self.point_to_point.sending.values())
        return running or sending or any(source == rank for source, _ in self.point_to_point.receiving)

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
        """Return the difference between this peer's description of the group and ours, or None."""
        if (body.generation, body.name) != (self.command.generation, self.command.name):
            return f"rank {peer} calls it {body.name!r} of start {body.generation}"
        if body.rank != peer or body.world != self.world:
            return f"it says it is rank {body.rank} of {body.world}, here it is rank {peer} of {self.world}"
        if body.membership != membership_digest(self.workers):
            return f"rank {peer} has another list of ranks"
        return None

    def open_timeout_failure(self) -> Failure:
        """Return a failure that names the ranks which did not join in time."""
        missing = [rank for rank in self.others() if rank not in self.joined]
        names = ", ".join(f"rank {rank}" for rank in missing) or "rank 0 (cost table)"
        message = f"{names} did not enter the group within {self.command.timeout_s:g} s"
        return Failure("operation-timeout", message, late=tuple(missing))

    def early_send_gate(self, sequence: int) -> Callable[[int, int], bool]:
        """Return a function that checks and counts bytes sent before a peer started the operation."""

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
        """Release the early-send credit of an operation that the peer has started."""
        charge = self.early_sent.pop((peer, sequence), 0)
        if charge:
            self.early_sent_bytes[peer] -= charge

    def has_announced(self, peer: int, sequence: int) -> bool:
        """Return True if a peer has started an operation that this rank has not."""
        early = self.early.get((peer, sequence))
        return early is not None and early.encoded is not None

    def find_call(self, sequence: int) -> bytes:
        """Return the specification of this rank's operation with that number, empty if it is forgotten."""
        return next((encoded for number, encoded in reversed(self.recent) if number == sequence), b"")

    def store_early_start(self, peer: int, sequence: int, encoded: bytes) -> None:
        held = self.early_start_bytes.get(peer, 0) + len(encoded)
        if held > _MAX_EARLY_START_BYTES or len(self.early) >= _MAX_EARLY_STARTS:
            raise ProtocolError("another rank announced too many operations ahead")
        early = self.early.setdefault((peer, sequence), EarlyMessages())
        if early.encoded is not None:
            raise ProtocolError(f"operation {sequence} was started twice")
        early.encoded = encoded
        self.early_start_bytes[peer] = held

    def store_early_data(self, peer: int, sequence: int, ordinal: int, payload: bytes) -> None:
        held = self.early_bytes.get(peer, 0) + len(payload) + _EARLY_OVERHEAD
        if held > _MAX_EARLY_BYTES or len(self.early) >= _MAX_EARLY_STARTS:
            raise ProtocolError("another rank sent too much ahead")
        self.early_bytes[peer] = held
        self.early.setdefault((peer, sequence), EarlyMessages()).messages.append((ordinal, payload))

    def pop_early(self, peer: int, sequence: int) -> EarlyMessages | None:
        early = self.early.pop((peer, sequence), None)
        if early is not None:
            held = sum(len(payload) + _EARLY_OVERHEAD for _, payload in early.messages)
            self.early_bytes[peer] = self.early_bytes.get(peer, 0) - held
            started = len(early.encoded or b"")
            self.early_start_bytes[peer] = self.early_start_bytes.get(peer, 0) - started
        return early
