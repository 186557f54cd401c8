"""Runs the programs of all ranks against each other, and proves that no schedule could change the result.

Memory has one cell per byte, and a cell holds any Python value, so that sums are exact and can be traced.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from barnraise.collectives.algorithms.schedule import Schedule, indexed

Cells = list[Any]
Combine = Callable[[Any, Any], Any]
Event = tuple[str, int, int]
"""("read", rank, send) or ("apply", rank, receive)."""

HALF_WRITTEN = None


def matched(schedules: Sequence[Schedule]) -> dict[tuple[int, int], tuple[int, int]]:
    """(receiver, receive) -> (sender, send); fails unless every message has exactly one taker of its size."""
    pairs: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, schedule in enumerate(schedules):
        index = indexed(schedule)
        for number, send in enumerate(schedule.sends):
            assert send.peer != rank, "a message to oneself"
            taker = indexed(schedules[send.peer]).receives_from[rank][index.send_ordinals[number]]
            receive = schedules[send.peer].receives[taker]
            assert receive.hi - receive.lo == send.hi - send.lo
            pairs[send.peer, taker] = (rank, number)
    assert len(pairs) == sum(len(schedule.receives) for schedule in schedules), "a receive without a send"
    return pairs


class Causes:
    """Events that precede each event in every possible message order."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        pairs = matched(schedules)
        direct: dict[Event, list[Event]] = {}
        for rank, schedule in enumerate(schedules):
            for number, send in enumerate(schedule.sends):
                direct["read", rank, number] = [("apply", rank, other) for other in send.after]
            for number, receive in enumerate(schedule.receives):
                direct["apply", rank, number] = [
                    ("read", *pairs[rank, number]),
                    *(("apply", rank, other) for other in receive.after),
                    *(("read", rank, other) for other in receive.after_sends),
                ]
        self._bit = {event: 1 << position for position, event in enumerate(direct)}
        self._past: dict[Event, int] = {}
        waiting = list(direct)
        while waiting:
            later = []
            for event in waiting:
                if all(cause in self._past for cause in direct[event]):
                    past = 0
                    for cause in direct[event]:
                        past |= self._past[cause] | self._bit[cause]
                    self._past[event] = past
                else:
                    later.append(event)
            assert len(later) < len(waiting), "messages wait for each other in a circle"
            waiting = later

    def before(self, cause: Event, event: Event) -> bool:
        return bool(self._past[event] & self._bit[cause])


def prove_free_of_races(schedules: Sequence[Schedule]) -> None:
    """Check that dependencies order every send and receive that touch the same bytes."""
    before = Causes(schedules).before
    for rank, schedule in enumerate(schedules):
        for number, receive in enumerate(schedule.receives):
            applied = ("apply", rank, number)
            for other, send in enumerate(schedule.sends):
                if send.lo < receive.hi and receive.lo < send.hi:
                    read = ("read", rank, other)
                    assert before(applied, read) or before(read, applied), f"{send} may see {receive}"
            for other, earlier in enumerate(schedule.receives[:number]):
                if earlier.lo < receive.hi and receive.lo < earlier.hi:
                    first = ("apply", rank, other)
                    assert before(first, applied) or before(applied, first), f"{earlier} races {receive}"


class Simulation:
    """One simulated run of all ranks' schedules."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        memories: Sequence[Cells],
        combine: Combine,
        seed: int,
        strict: bool = False,
    ) -> None:
        self.schedules = schedules
        self.memories = [list(memory) for memory in memories]
        self.combine = combine
        self.random = random.Random(seed)
        self.strict = strict
        self.index = [indexed(schedule) for schedule in schedules]
        self.send_waits = [list(index.send_waits) for index in self.index]
        self.receive_waits = [list(index.receive_waits) for index in self.index]
        self.unread = [set(range(len(schedule.sends))) for schedule in schedules]
        self.unapplied = sum(len(schedule.receives) for schedule in schedules)
        self.ready = [(rank, number) for rank, index in enumerate(self.index) for number in index.ready_sends]
        self.flying: list[tuple[int, int, Cells]] = []
        self.landing: list[tuple[int, int, Cells]] = []
        self.held: dict[tuple[int, int], Cells] = {}
        # Some runs read as late as they can, some as early.
        self.eagerness = self.random.choice([0.02, 0.3, 0.9])

    def run(self) -> list[Cells]:
        while self.unapplied or any(self.unread):
            reads: Sequence[tuple[int, int]] = self.ready
            arrivals: Sequence[int] = range(len(self.flying))
            if self.strict:
                reads = [read for read in reads if self._link_is_free(*read)]
                arrivals = [at for at in arrivals if not self._waits(*self.flying[at][:2])]
            others = len(arrivals) + len(self.landing)
            assert reads or others, "nothing can move any more"
            if reads and (not others or self.random.random() < self.eagerness):
                self._read(*self.random.choice(reads))
            elif arrivals and (not self.landing or self.random.random() < 0.5):
                self._land(self.random.choice(arrivals))
            else:
                rank, number, cells = self.landing.pop(self.random.randrange(len(self.landing)))
                self._arrive(rank, number, cells)
        assert (self.flying, self.landing, self.held) == ([], [], {})
        return self.memories

    def _link_is_free(self, rank: int, number: int) -> bool:
        peer, sends = self.schedules[rank].sends[number].peer, self.schedules[rank].sends
        first = min(other for other in self.unread[rank] if sends[other].peer == peer)
        busy = any(
            to == peer and self.schedules[to].receives[taker].peer == rank for to, taker, _ in self.flying
        )
        return number == first and not busy

    def _waits(self, rank: int, taker: int) -> bool:
        return bool(self.receive_waits[rank][taker])

    def _read(self, rank: int, number: int) -> None:
        send = self.schedules[rank].sends[number]
        taker = self.index[send.peer].receives_from[rank][self.index[rank].send_ordinals[number]]
        cells = self.memories[rank][send.lo : send.hi]
        assert HALF_WRITTEN not in cells, "sent bytes that were still being received"
        self.flying.append((send.peer, taker, cells))
        self.unread[rank].remove(number)
        self.ready.remove((rank, number))
        for receive in self.index[rank].read_unlocks[number]:
            self._let_go(rank, receive)

    def _land(self, position: int) -> None:
        rank, number, cells = self.flying.pop(position)
        receive = self.schedules[rank].receives[number]
        if not receive.reduce and not self.receive_waits[rank][number]:
            self.memories[rank][receive.lo : receive.hi] = [HALF_WRITTEN] * len(cells)
        self.landing.append((rank, number, cells))

    def _arrive(self, rank: int, number: int, cells: Cells) -> None:
        if self.receive_waits[rank][number]:
            self.held[rank, number] = cells
            return
        receive = self.schedules[rank].receives[number]
        if receive.reduce:
            own_cells = self.memories[rank][receive.lo : receive.hi]
            assert HALF_WRITTEN not in own_cells
            pairs = (
                zip(cells, own_cells, strict=True)
                if receive.incoming_first
                else zip(own_cells, cells, strict=True)
            )
            cells = [self.combine(first, second) for first, second in pairs]
        self.memories[rank][receive.lo : receive.hi] = cells
        self.unapplied -= 1
        for send in self.index[rank].send_unlocks[number]:
            self.send_waits[rank][send] -= 1
            if not self.send_waits[rank][send]:
                self.ready.append((rank, send))
        for later in self.index[rank].receive_unlocks[number]:
            self._let_go(rank, later)

    def _let_go(self, rank: int, receive: int) -> None:
        self.receive_waits[rank][receive] -= 1
        if not self.receive_waits[rank][receive] and (rank, receive) in self.held:
            self._arrive(rank, receive, self.held.pop((rank, receive)))
