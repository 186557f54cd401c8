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
        state = self._ranks[rank]
        state.has_begun = True
        for number in state.program.ready_sends:
            self._send(rank, state, number)
        for number in sorted(state.arrived):
            if number in state.arrived and not state.receive_waits[number]:
                self._apply(rank, state, number)
        self._end(rank, state)

    def _send(self, rank: int, state: _Rank, number: int) -> None:
        send = state.program.steps.sends[number]
        arrived = partial(self._arrive, send.peer, rank)
        self._network.send(self._owner, self._hosts[rank], self._hosts[send.peer], send.hi - send.lo, arrived)
        for other in state.program.read_unlocks[number]:
            self._unlock(rank, state, other)

    def _arrive(self, rank: int, sender: int) -> None:
        receiver_state, sender_state = self._ranks[rank], self._ranks[sender]
        number = receiver_state.program.receives_from[sender][receiver_state.heard.get(sender, 0)]
        receiver_state.heard[sender] = receiver_state.heard.get(sender, 0) + 1
        receiver_state.arrived.add(number)
        sender_state.unsent -= 1
        if receiver_state.has_begun and not receiver_state.receive_waits[number]:
            self._apply(rank, receiver_state, number)
        self._end(rank, receiver_state)
        self._end(sender, sender_state)

    def _unlock(self, rank: int, state: _Rank, number: int) -> None:
        state.receive_waits[number] -= 1
        if not state.receive_waits[number] and number in state.arrived and state.has_begun:
            self._apply(rank, state, number)

    def _apply(self, rank: int, state: _Rank, number: int) -> None:
        state.arrived.discard(number)
        state.unapplied -= 1
        for send in state.program.send_unlocks[number]:
            state.send_waits[send] -= 1
            if not state.send_waits[send]:
                self._send(rank, state, send)
        for receive in state.program.receive_unlocks[number]:
            self._unlock(rank, state, receive)

    def _end(self, rank: int, state: _Rank) -> None:
        if state.has_begun and not state.unsent and not state.unapplied and not state.has_ended:
            state.has_ended = True
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
