"""The messages of a collective on simulated links: each rank's program, as the strategies compile it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial

from barnraise.collectives.algorithms.compile import compile_schedule
from barnraise.collectives.algorithms.schedule import BufferLayout, IndexedSchedule
from benchmarks.simulation.network import Network


@lru_cache(maxsize=64)
def compiled(kind: str, strategy: str, world: int, layout: BufferLayout) -> tuple[IndexedSchedule, ...]:
    """Compile the schedule of every rank."""
    return tuple(compile_schedule(kind, strategy, rank, world, layout).index for rank in range(world))


class Operation:
    """One collective whose ranks start at any time.

    ``done(rank)`` is called when the rank has its result and has sent all.
    """

    def __init__(
        self,
        network: Network,
        owner: Hashable,
        hosts: Sequence[int],
        programs: Sequence[IndexedSchedule],
        done: Callable[[int], None],
    ) -> None:
        self._network, self._owner, self._hosts, self._done = network, owner, hosts, done
        self._ranks = [_Rank(program) for program in programs]

    def begin(self, rank: int) -> None:
        one = self._ranks[rank]
        one.has_begun = True
        for number in one.program.ready_sends:
            self._send(rank, one, number)
        for number in sorted(one.arrived):
            if number in one.arrived and not one.receive_waits[number]:
                self._apply(rank, one, number)
        self._end(rank, one)

    def _send(self, rank: int, one: _Rank, number: int) -> None:
        send = one.program.steps.sends[number]
        arrived = partial(self._arrive, send.peer, rank)
        self._network.send(self._owner, self._hosts[rank], self._hosts[send.peer], send.hi - send.lo, arrived)
        for other in one.program.read_unlocks[number]:
            self._unlock(rank, one, other)

    def _arrive(self, rank: int, sender: int) -> None:
        one, other = self._ranks[rank], self._ranks[sender]
        number = one.program.receives_from[sender][one.heard.get(sender, 0)]
        one.heard[sender] = one.heard.get(sender, 0) + 1
        one.arrived.add(number)
        other.unsent -= 1
        if one.has_begun and not one.receive_waits[number]:
            self._apply(rank, one, number)
        self._end(rank, one)
        self._end(sender, other)

    def _unlock(self, rank: int, one: _Rank, number: int) -> None:
        one.receive_waits[number] -= 1
        if not one.receive_waits[number] and number in one.arrived and one.has_begun:
            self._apply(rank, one, number)

    def _apply(self, rank: int, one: _Rank, number: int) -> None:
        one.arrived.discard(number)
        one.unapplied -= 1
        for send in one.program.send_unlocks[number]:
            one.send_waits[send] -= 1
            if not one.send_waits[send]:
                self._send(rank, one, send)
        for receive in one.program.receive_unlocks[number]:
            self._unlock(rank, one, receive)

    def _end(self, rank: int, one: _Rank) -> None:
        if one.has_begun and not one.unsent and not one.unapplied and not one.has_ended:
            one.has_ended = True
            self._done(rank)


class _Rank:
    def __init__(self, program: IndexedSchedule) -> None:
        self.program = program
        self.send_waits = list(program.send_waits)
        self.receive_waits = list(program.receive_waits)
        self.heard: dict[int, int] = {}  # messages by sender
        self.arrived: set[int] = set()  # receives whose bytes are here and not yet applied
        self.unsent, self.unapplied = len(program.steps.sends), len(program.steps.receives)
        self.has_begun = self.has_ended = False
