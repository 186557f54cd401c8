"""Rendezvous of processes that were started by hand: they meet in the store and get ranks.

Each process takes a seat in a seat map, which is a key of their run. When the map is full, all processes are
asked to confirm. A process that does not confirm, such as one that was killed earlier, loses its seat. A
full map whose processes have all confirmed is a generation, and its seats are the ranks.

Every change is one compare-and-set, so any process may make it and may stop at any time. The caller passes a
clock; the store does the waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import ConfigError, MembershipError, OperationTimeout

CONFIRM_S = 5.0
_POLL_S = 1.0
_FIRST_NOTE_S = 10.0
_NOTE_S = 60.0
_KEPT = 20
_SEAT_MAP = "table"


class RendezvousStore(Protocol):
    """Part of the store client that a rendezvous needs."""

    @property
    def number(self) -> int: ...

    def get(self, key: str) -> bytes | None: ...

    def set(self, key: str, value: bytes) -> None: ...

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...

    def delete(self, key: str) -> bool: ...

    def missing(self, keys: Sequence[str]) -> tuple[str, ...]: ...

    def wait(self, keys: Sequence[str], timeout_s: float) -> None: ...


class RankRequest(NamedTuple):
    """World size and rank that a process asks for.

    ``fixed``: a person or a launcher chose the world size, not the size of the view.
    """

    world: int
    fixed: bool
    rank: int | None


class RankPlace(NamedTuple):
    """Rank that a process got, with its generation and world size."""

    generation: int
    rank: int
    world: int


class _Seat(msgspec.Struct, frozen=True, array_like=True):
    """Seat of one process in the map."""

    process: str
    world: Annotated[int, Meta(ge=1)]
    fixed: bool
    rank: int | None


class _SeatMap(msgspec.Struct, frozen=True, array_like=True):
    """Seats of all processes, and the state of the confirmation.

    ``confirmed``: all seats have just confirmed. ``spent``: keys of the last confirmation, to be deleted.
    """

    version: int = 0
    is_confirming: bool = False
    confirmed: bool = False
    generation: int = 0
    seats: tuple[_Seat, ...] = ()
    spent: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        fixed = [seat.world for seat in self.seats if seat.fixed]
        return max(fixed or [seat.world for seat in self.seats])

    @property
    def is_full(self) -> bool:
        return bool(self.seats) and len(self.seats) >= self.world

    def confirm_keys(self) -> tuple[str, ...]:
        return tuple(f"here/{self.version}/{seat.process}" for seat in self.seats)


class Rendezvous:
    """One process on its way to a rank. ``claim`` is called again while it waits, because the view may
    change.
    """

    def __init__(
        self,
        store: RendezvousStore,
        me: str,
        claim: Callable[[], RankRequest],
        clock: Callable[[], float],
        report: Callable[[str], None],
    ) -> None:
        self._store = store
        self._me = me
        self._claim = claim
        self._clock = clock
        self._report = report
        self._next_note = clock() + _FIRST_NOTE_S

    def arrive(self, timeout_s: float) -> RankPlace:
        """Wait for the other processes and return the rank.

        Raise OperationTimeout if too few processes came, ConfigError if their requests contradict each
        other.
        """
        deadline = self._clock() + timeout_s
        while True:
            data = self._store.get(_SEAT_MAP) or b""
            seat_map = _read(data)
            if seat_map.is_confirming:
                place = self._confirm(seat_map, data)
                if place is not None:
                    return place
            else:
                self._take_seat(seat_map, data)
            if self._clock() >= deadline:
                self._leave()
                arrived = sum(seat.process != self._me for seat in seat_map.seats) + 1
                world = max(arrived, seat_map.world if seat_map.seats else 1)
                raise OperationTimeout(
                    f"{arrived} of {world} processes came to the rendezvous within {timeout_s:g} s",
                    hint="Start the script on the other machines, or set BARNRAISE_WORLD to their number.",
                )

    def _take_seat(self, seat_map: _SeatMap, data: bytes) -> None:
        """Take a seat or wait for other processes; start the confirmation when the map is full."""
        world, fixed, rank = self._claim()
        if rank is not None and not 0 <= rank < world:
            raise ConfigError(
                f"rank {rank} does not exist in a world of {world}", hint="Correct RANK or WORLD_SIZE."
            )
        seat = _Seat(self._me, world, fixed, rank)
        others = [other for other in seat_map.seats if other.process != self._me]
        conflict = _conflict(seat, others)
        if conflict is not None:
            if seat_map.confirmed:
                raise ConfigError(
                    conflict, hint="Give all processes of the run the same world and each its own rank."
                )
            # The other seat may belong to a process that has died.
            self._change_map(seat_map, data, is_confirming=True, seats=tuple(others))
            return
        seats = tuple(seat if other.process == self._me else other for other in seat_map.seats)
        if len(others) == len(seat_map.seats):
            seats = (*seat_map.seats, seat)
        if _SeatMap(seats=seats).is_full or seats != seat_map.seats:
            self._change_map(seat_map, data, is_confirming=_SeatMap(seats=seats).is_full, seats=seats)
            return
        if self._clock() >= self._next_note:
            self._next_note = self._clock() + _NOTE_S
            self._report(f"{len(seats)} of {seat_map.world} processes are here; waiting for the others")
        self._wait_for([f"changed/{seat_map.version + 1}"], _POLL_S)

    def _confirm(self, seat_map: _SeatMap, data: bytes) -> RankPlace | None:
        """Confirm the own seat, wait for the others, and agree on absent ones; the first result counts."""
        if any(seat.process == self._me for seat in seat_map.seats):
            self._store.set(f"here/{seat_map.version}/{self._me}", b"")
        absent: list[str] = []
        if not self._wait_for(seat_map.confirm_keys(), CONFIRM_S):
            silent = set(self._store.missing(seat_map.confirm_keys()))
            absent = [
                seat.process
                for seat, key in zip(seat_map.seats, seat_map.confirm_keys(), strict=True)
                if key in silent
            ]
        outcome = self._store.compare_set(f"outcome/{seat_map.version}", b"", msgspec.msgpack.encode(absent))
        missing = set(_names(outcome))
        world = seat_map.world if seat_map.seats else 1
        formed = not missing and seat_map.is_full
        rest = (
            seat_map.seats[world:]
            if formed
            else tuple(seat for seat in seat_map.seats if seat.process not in missing)
        )
        self._change_map(
            seat_map, data, seats=rest, confirmed=not missing and not formed, spent=seat_map.confirm_keys()
        )
        if not formed:
            return None
        return _place(seat_map.seats[:world], self._me, seat_map.generation, world)

    def _change_map(
        self,
        seat_map: _SeatMap,
        data: bytes,
        *,
        seats: tuple[_Seat, ...],
        is_confirming: bool = False,
        confirmed: bool = False,
        spent: tuple[str, ...] = (),
    ) -> None:
        """Write the next seat map, unless another process has changed it first."""
        # Operation numbers of the store grow, so this generation is later than all before it.
        next_map = _SeatMap(seat_map.version + 1, is_confirming, confirmed, self._store.number, seats, spent)
        encoded = msgspec.msgpack.encode(next_map)
        if self._store.compare_set(_SEAT_MAP, data, encoded) != encoded:
            return
        self._store.set(f"changed/{next_map.version}", b"")
        old = next_map.version - _KEPT
        sweep = seat_map.spent if old < 0 else (*seat_map.spent, f"changed/{old}", f"outcome/{old}")
        for key in sweep:
            self._store.delete(key)

    def _leave(self) -> None:
        """Free the seat, so that the next attempt need not wait for this process."""
        data = self._store.get(_SEAT_MAP) or b""
        seat_map = _read(data)
        seats = tuple(seat for seat in seat_map.seats if seat.process != self._me)
        if not seat_map.is_confirming and seats != seat_map.seats:
            self._change_map(seat_map, data, seats=seats)

    def _wait_for(self, keys: Sequence[str], timeout_s: float) -> bool:
        try:
            self._store.wait(keys, timeout_s)
        except (OperationTimeout, MembershipError):  # the latter: no quorum at the moment
            return False
        return True


def _conflict(seat: _Seat, others: Sequence[_Seat]) -> str | None:
    for other in others:
        if seat.fixed and other.fixed and seat.world != other.world:
            return f"one process of the run has a world size of {seat.world}, another one of {other.world}"
        if seat.rank is not None and seat.rank == other.rank:
            return f"two processes of the run were given rank {seat.rank}"
    return None


def _place(seats: Sequence[_Seat], me: str, generation: int, world: int) -> RankPlace | None:
    """Return the own rank: given ranks stay, the others are filled in order of arrival."""
    given = {seat.rank for seat in seats}
    free = iter([rank for rank in range(world) if rank not in given])
    for seat in seats:
        rank = next(free) if seat.rank is None else seat.rank
        if seat.process == me:
            return RankPlace(generation, rank, world)
    return None


def _read(data: bytes) -> _SeatMap:
    if not data:
        return _SeatMap()
    return decode(_seat_maps, data, "the seat map of the rendezvous cannot be read")


def _names(data: bytes) -> list[str]:
    return decode(_outcomes, data, "the outcome of a rendezvous cannot be read")


_seat_maps = msgspec.msgpack.Decoder(_SeatMap)
_outcomes = msgspec.msgpack.Decoder(list[str])
