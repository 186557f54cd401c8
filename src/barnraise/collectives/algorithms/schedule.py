"""Schedule of one rank for one operation: its sends and receives as plain data.

An algorithm compiles an operation into one ``Schedule`` per rank. The communication process executes it.
The rules:

* The k-th ``SendStep`` of a to b carries exactly the k-th ``ReceiveStep`` of b from a. Both sizes are
  equal.
* A send may be read from memory at any time after its ``after`` receives are applied and before its
  delivery.
* A receive that does not reduce is placed straight into memory as its bytes come in.
* A receive that reduces is applied as a whole. All of ``after`` must be applied before it. All of
  ``after_sends`` must be read from memory before it (passed to the link, not delivered).
* The order listed is the order in which ready sends should leave.

No later receive overwrites bytes of a send that may still be unread. Either the receive can only arrive
because that send was delivered, or ``after_sends`` names the send.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import lcm
from typing import NamedTuple

from barnraise.core.errors import ConfigError

MAX_SEGMENT_BYTES = 1 << 20
DEFAULT_SEGMENT_BYTES = 1 << 18
PREFERRED_ALIGNMENT = 64
SHAPES = ("ring", "tree", "star")

NONE: tuple[int, ...] = ()


class OperationKind(StrEnum):
    """The operations that are compiled into schedules."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    GATHER = "gather"
    SCATTER = "scatter"
    BARRIER = "barrier"


@dataclass(frozen=True, slots=True)
class SendStep:
    """Send of bytes ``[lo, hi)`` of the work buffer to ``peer``, after the receives ``after`` are applied."""

    peer: int
    lo: int
    hi: int
    after: tuple[int, ...] = NONE


@dataclass(frozen=True, slots=True)
class ReceiveStep:
    """Receive of bytes from ``peer``, placed into ``[lo, hi)`` or combined into it if ``reduce``.

    ``incoming_first`` asks for ``incoming OP mine`` instead of ``mine OP incoming``. Two ranks that combine
    the same pair then get the same bits, also for signed zeros and NaN.
    """

    peer: int
    lo: int
    hi: int
    reduce: bool = False
    after: tuple[int, ...] = NONE
    after_sends: tuple[int, ...] = NONE
    incoming_first: bool = False


@dataclass(frozen=True)
class Schedule:
    """All steps of one rank in one operation. Compiled once, executed many times."""

    sends: tuple[SendStep, ...] = ()
    receives: tuple[ReceiveStep, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.sends and not self.receives

    @cached_property
    def index(self) -> IndexedSchedule:
        sends, receives = self.sends, self.receives
        sends_to = _by_peer([send.peer for send in sends])
        receives_from = _by_peer([receive.peer for receive in receives])
        ordinals = [0] * len(sends)
        for numbers in sends_to.values():
            for ordinal, number in enumerate(numbers):
                ordinals[number] = ordinal
        return IndexedSchedule(
            steps=self,
            peers=frozenset(sends_to) | frozenset(receives_from),
            receives_from=receives_from,
            send_ordinals=tuple(ordinals),
            ready_sends=tuple(number for number, send in enumerate(sends) if not send.after),
            send_waits=tuple(len(send.after) for send in sends),
            receive_waits=tuple(len(receive.after) + len(receive.after_sends) for receive in receives),
            send_unlocks=_inverted((send.after for send in sends), len(receives)),
            receive_unlocks=_inverted((receive.after for receive in receives), len(receives)),
            read_unlocks=_inverted((receive.after_sends for receive in receives), len(sends)),
        )


@dataclass(frozen=True, slots=True)
class IndexedSchedule:
    """A schedule with lookup tables for its execution. Numbers are positions in the schedule's tuples."""

    steps: Schedule
    peers: frozenset[int]
    """Every rank that this schedule exchanges a message with."""
    receives_from: dict[int, tuple[int, ...]]
    """By peer: its receives in order. The k-th message of the peer is for the k-th of these."""
    send_ordinals: tuple[int, ...]
    """Per send: its position among the messages to its peer, from 0."""
    ready_sends: tuple[int, ...]
    """Sends that may leave at once."""
    send_waits: tuple[int, ...]
    """Per send: how many receives it waits for."""
    receive_waits: tuple[int, ...]
    """Per receive: how many receives and reads of sends it waits for."""
    send_unlocks: tuple[tuple[int, ...], ...]
    """Per receive: the sends that wait for it."""
    receive_unlocks: tuple[tuple[int, ...], ...]
    """Per receive: the receives that wait for it."""
    read_unlocks: tuple[tuple[int, ...], ...]
    """Per send: the receives that wait until it was read from memory."""


EMPTY = Schedule()


def indexed(schedule: Schedule) -> IndexedSchedule:
    """Return the schedule with its lookup tables, which are built at the first call and cached."""
    return schedule.index


class StageShapes(NamedTuple):
    """Shapes of a hierarchical sum: to the leader of each site, among the leaders, and back."""

    reduce: str = "ring"
    across: str = "ring"
    broadcast: str = "ring"


CHAINS = StageShapes()


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Sizes in bytes and all other inputs of a schedule, except rank and world.

    ``sizes`` depends on the operation:

    * all_reduce, reduce and broadcast: ``(nbytes,)``.
    * all_gather, reduce_scatter, gather and scatter: one block per rank.
    * all_to_all: this rank's send splits, then its receive splits.
    * barrier: empty.

    Every size is a whole number of items.
    """

    sizes: tuple[int, ...] = ()
    item: int = 1
    root: int = 0
    segment: int = DEFAULT_SEGMENT_BYTES
    arity: int = 2
    order: tuple[int, ...] = ()
    """The ring's order as ranks; empty means 0, 1, 2, ..."""
    sites: tuple[tuple[int, ...], ...] = ()
    """The ranks of each site along its chain, the leader first; empty means each its own."""
    shapes: StageShapes = CHAINS


def chunk_bounds(nbytes: int, parts: int, item: int) -> tuple[int, ...]:
    """Return ``parts + 1`` bounds that cut ``nbytes`` at whole items. The first chunks get the remainder."""
    items = nbytes // item
    each, left = divmod(items, parts)
    return tuple(item * (part * each + min(part, left)) for part in range(parts + 1))


def block_bounds(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the offsets of consecutive blocks, and the end of the last block."""
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return tuple(bounds)


def segments(lo: int, hi: int, item: int, segment: int) -> tuple[tuple[int, int], ...]:
    """Cut ``[lo, hi)`` into nearly equal segments of at most ``segment`` bytes, each of whole items.

    The cut depends on the length only, so both ends of a transfer cut the same segments.
    """
    length = hi - lo
    if length <= 0:
        return ()
    if length <= segment:
        return ((lo, hi),)
    grain = lcm(item, PREFERRED_ALIGNMENT)
    if grain > segment:
        grain = item
    max_bytes = max(grain, segment // grain * grain)
    count = -(-length // max_bytes)
    step = -(-length // (count * grain)) * grain
    return tuple((start, min(start + step, hi)) for start in range(lo, hi, step))


class ScheduleBuilder:
    """Builds a schedule from steps in order, and derives their dependencies.

    * A send waits for the receives that last wrote its bytes.
    * A reducing receive waits for them too, which fixes the order of every sum.
    * A placing receive waits for nothing. Its bytes are final and arrive only after all replaced bytes were
      used.
    """

    def __init__(self, item: int = 1, segment: int = DEFAULT_SEGMENT_BYTES) -> None:
        self.item = item
        self.segment = segment
        self._sends: list[SendStep] = []
        self._receives: list[ReceiveStep] = []
        self._writers = _LastWriters()

    def cut(self, lo: int, hi: int) -> tuple[tuple[int, int], ...]:
        return segments(lo, hi, self.item, self.segment)

    def send(self, peer: int, lo: int, hi: int) -> None:
        """Send a range, cut into segments. An empty range sends no message."""
        for start, stop in self.cut(lo, hi):
            self.send_segment(peer, start, stop)

    def send_segment(self, peer: int, lo: int, hi: int) -> int:
        self._sends.append(SendStep(peer, lo, hi, self._writers.of(lo, hi)))
        return len(self._sends) - 1

    def place(self, peer: int, lo: int, hi: int) -> None:
        """Receive the final bytes of a range, cut into segments."""
        for start, stop in self.cut(lo, hi):
            self.place_segment(peer, start, stop)

    def place_segment(self, peer: int, lo: int, hi: int) -> None:
        self._append(ReceiveStep(peer, lo, hi))

    def reduce(self, peer: int, lo: int, hi: int) -> None:
        """Receive and combine a range, cut into segments."""
        for start, stop in self.cut(lo, hi):
            self.reduce_segment(peer, start, stop)

    def reduce_segment(
        self,
        peer: int,
        lo: int,
        hi: int,
        *,
        after_sends: tuple[int, ...] = NONE,
        incoming_first: bool = False,
    ) -> None:
        after = self._writers.of(lo, hi)
        self._append(ReceiveStep(peer, lo, hi, True, after, after_sends, incoming_first))

    def send_token(self, peer: int) -> None:
        """Send an empty message after all receives so far."""
        self._sends.append(SendStep(peer, 0, 0, tuple(range(len(self._receives)))))

    def receive_token(self, peer: int) -> None:
        self._receives.append(ReceiveStep(peer, 0, 0))

    def build(self) -> Schedule:
        return Schedule(tuple(self._sends), tuple(self._receives))

    def _append(self, receive: ReceiveStep) -> None:
        self._writers.write(receive.lo, receive.hi, len(self._receives))
        self._receives.append(receive)


class _LastWriters:
    """The receive that last wrote each byte, as sorted disjoint ranges."""

    def __init__(self) -> None:
        self._los: list[int] = []
        self._his: list[int] = []
        self._numbers: list[int] = []

    def of(self, lo: int, hi: int) -> tuple[int, ...]:
        first, last = self._span(lo, hi)
        if last - first <= 1:
            return tuple(self._numbers[first:last])
        return tuple(sorted(set(self._numbers[first:last])))

    def write(self, lo: int, hi: int, number: int) -> None:
        first, last = self._span(lo, hi)
        chunk_ranges = [(lo, hi, number)]
        if first < last:
            if self._los[first] < lo:
                chunk_ranges.insert(0, (self._los[first], lo, self._numbers[first]))
            if self._his[last - 1] > hi:
                chunk_ranges.append((hi, self._his[last - 1], self._numbers[last - 1]))
        self._los[first:last] = [entry[0] for entry in chunk_ranges]
        self._his[first:last] = [entry[1] for entry in chunk_ranges]
        self._numbers[first:last] = [entry[2] for entry in chunk_ranges]

    def _span(self, lo: int, hi: int) -> tuple[int, int]:
        first = bisect_right(self._his, lo)
        return first, max(first, bisect_left(self._los, hi))


def check_layout(rank: int, world: int, layout: BufferLayout) -> None:
    """Raise ConfigError if no schedule can be compiled from these numbers."""
    if world < 1 or not 0 <= rank < world:
        raise ConfigError(f"rank {rank} is not in a world of {world}", hint="Use ranks 0 to world - 1.")
    if not 0 <= layout.root < world:
        raise ConfigError(f"root {layout.root} is not in a world of {world}", hint="Use a rank as root.")
    if layout.item < 1 or any(size < 0 or size % layout.item for size in layout.sizes):
        raise ConfigError(
            f"sizes {layout.sizes[:8]} are not whole items of {layout.item} bytes",
            hint="Give every size as the number of elements times the element size.",
        )
    if not layout.item <= layout.segment <= MAX_SEGMENT_BYTES:
        raise ConfigError(
            f"a segment of {layout.segment} bytes is not between {layout.item} and {MAX_SEGMENT_BYTES}",
            hint="Choose a segment of 32 KiB to 1 MiB.",
        )
    if layout.order and sorted(layout.order) != list(range(world)):
        raise ConfigError(
            f"the ring order {layout.order} does not name each of {world} ranks once",
            hint="List every rank exactly once, or leave the order out.",
        )
    if layout.sites and sorted(rank for site in layout.sites for rank in site) != list(range(world)):
        raise ConfigError(
            f"the sites {layout.sites} do not name each of {world} ranks once",
            hint="List every rank in exactly one site, or leave the sites out.",
        )
    for shape in layout.shapes:
        if shape not in SHAPES:
            raise ConfigError(
                f"a hierarchical sum has no shape {shape!r}", hint=f"Use one of {', '.join(SHAPES)}."
            )


def _by_peer(peers: Sequence[int]) -> dict[int, tuple[int, ...]]:
    grouped: dict[int, list[int]] = {}
    for number, peer in enumerate(peers):
        grouped.setdefault(peer, []).append(number)
    return {peer: tuple(numbers) for peer, numbers in grouped.items()}


def _inverted(waits: Iterable[tuple[int, ...]], count: int) -> tuple[tuple[int, ...], ...]:
    waiting: list[list[int]] = [[] for _ in range(count)]
    for number, after in enumerate(waits):
        for other in after:
            waiting[other].append(number)
    return tuple(tuple(numbers) for numbers in waiting)
