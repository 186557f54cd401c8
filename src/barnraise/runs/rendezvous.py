"""How processes that were started by hand meet on the board and become the ranks of one generation.

They sit down at a table, a key in the lobby of their run. When it is full everybody is called, and who does
not answer, such as one that was killed at an earlier try, loses its seat. A full table where all have
answered is a generation; its seats are the ranks. Every change is one compare-and-set, so it does not
matter who makes it, or who dies meanwhile. Time is given as a clock, waiting is done by the lobby.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import ConfigError, MembershipError, OperationTimeout

CALL_S = 5.0
_LOOK_S = 1.0
_FIRST_WORD_S = 10.0
_WORD_S = 60.0
_KEPT = 20
_TABLE = "table"


class RendezvousStore(Protocol):
    """What is needed of a `BoardClient`."""

    @property
    def number(self) -> int: ...

    def get(self, key: str) -> bytes | None: ...

    def set(self, key: str, value: bytes) -> None: ...

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...

    def delete(self, key: str) -> bool: ...

    def missing(self, keys: Sequence[str]) -> tuple[str, ...]: ...

    def wait(self, keys: Sequence[str], timeout_s: float) -> None: ...


class RankRequest(NamedTuple):
    """What a process was told about its run. ``fixed``: by a person or a launcher, not by the view's size."""

    world: int
    fixed: bool
    rank: int | None


class RankPlace(NamedTuple):
    generation: int
    rank: int
    world: int


class _Seat(msgspec.Struct, frozen=True, array_like=True):
    who: str
    world: Annotated[int, Meta(ge=1)]
    fixed: bool
    rank: int | None


class _SeatMap(msgspec.Struct, frozen=True, array_like=True):
    """``confirmed``: all seats have just answered. ``spent``: keys of the last call, to be swept away."""

    version: int = 0
    calling: bool = False
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

    def calls(self) -> tuple[str, ...]:
        return tuple(f"here/{self.version}/{seat.who}" for seat in self.seats)


class Rendezvous:
    """One process on its way to a rank. ``claim`` is asked anew while it waits: the view may change."""

    def __init__(
        self,
        lobby: RendezvousStore,
        me: str,
        claim: Callable[[], RankRequest],
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._lobby = lobby
        self._me = me
        self._claim = claim
        self._clock = clock
        self._say = say
        self._next_word = clock() + _FIRST_WORD_S

    def arrive(self, timeout_s: float) -> RankPlace:
        """OperationTimeout if too few came; ConfigError if they do not fit together."""
        deadline = self._clock() + timeout_s
        while True:
            data = self._lobby.get(_TABLE) or b""
            table = _read(data)
            if table.calling:
                place = self._call(table, data)
                if place is not None:
                    return place
            else:
                self._sit_down(table, data)
            if self._clock() >= deadline:
                self._leave()
                came = sum(seat.who != self._me for seat in table.seats) + 1
                raise OperationTimeout(
                    f"{came} of {max(came, table.world if table.seats else 1)} processes came to the "
                    f"rendezvous within {timeout_s:g} s",
                    hint="Start the script on the other machines too, or say how many come: BARNRAISE_WORLD.",
                )

    def _sit_down(self, table: _SeatMap, data: bytes) -> None:
        """Take a seat, or wait for others to come; call all when there is reason to."""
        world, fixed, rank = self._claim()
        if rank is not None and not 0 <= rank < world:
            raise ConfigError(
                f"rank {rank} does not exist in a world of {world}", hint="Correct RANK or WORLD_SIZE."
            )
        seat = _Seat(self._me, world, fixed, rank)
        others = [other for other in table.seats if other.who != self._me]
        conflict = _conflict(seat, others)
        if conflict is not None:
            if table.confirmed:
                raise ConfigError(
                    conflict, hint="Give all processes of the run the same world and each its own rank."
                )
            # Perhaps it is a seat of the dead.
            self._move(table, data, calling=True, seats=tuple(others))
            return
        seats = tuple(seat if other.who == self._me else other for other in table.seats)
        if len(others) == len(table.seats):
            seats = (*table.seats, seat)
        if _SeatMap(seats=seats).is_full or seats != table.seats:
            self._move(table, data, calling=_SeatMap(seats=seats).is_full, seats=seats)
            return
        if self._clock() >= self._next_word:
            self._next_word = self._clock() + _WORD_S
            self._say(f"{len(seats)} of {table.world} processes are here; waiting for the others")
        self._wait_for([f"changed/{table.version + 1}"], _LOOK_S)

    def _call(self, table: _SeatMap, data: bytes) -> RankPlace | None:
        """Answer, hear the others, and agree on who was absent: the first to say so is right."""
        if any(seat.who == self._me for seat in table.seats):
            self._lobby.set(f"here/{table.version}/{self._me}", b"")
        absent: list[str] = []
        if not self._wait_for(table.calls(), CALL_S):
            silent = set(self._lobby.missing(table.calls()))
            absent = [seat.who for seat, key in zip(table.seats, table.calls(), strict=True) if key in silent]
        outcome = self._lobby.compare_set(f"outcome/{table.version}", b"", msgspec.msgpack.encode(absent))
        gone = set(_names(outcome))
        world = table.world if table.seats else 1
        formed = not gone and table.is_full
        rest = table.seats[world:] if formed else tuple(seat for seat in table.seats if seat.who not in gone)
        self._move(table, data, seats=rest, confirmed=not gone and not formed, spent=table.calls())
        if not formed:
            return None
        return _place(table.seats[:world], self._me, table.generation, world)

    def _move(
        self,
        table: _SeatMap,
        data: bytes,
        *,
        seats: tuple[_Seat, ...],
        calling: bool = False,
        confirmed: bool = False,
        spent: tuple[str, ...] = (),
    ) -> None:
        """Change the table, if nobody else did so first."""
        # Numbers of the board's history grow, so this generation is later than all before it.
        following = _SeatMap(table.version + 1, calling, confirmed, self._lobby.number, seats, spent)
        encoded = msgspec.msgpack.encode(following)
        if self._lobby.compare_set(_TABLE, data, encoded) != encoded:
            return
        self._lobby.set(f"changed/{following.version}", b"")
        old = following.version - _KEPT
        sweep = table.spent if old < 0 else (*table.spent, f"changed/{old}", f"outcome/{old}")
        for key in sweep:
            self._lobby.delete(key)

    def _leave(self) -> None:
        """Free the seat, so that the next try need not call in vain."""
        data = self._lobby.get(_TABLE) or b""
        table = _read(data)
        seats = tuple(seat for seat in table.seats if seat.who != self._me)
        if not table.calling and seats != table.seats:
            self._move(table, data, seats=seats)

    def _wait_for(self, keys: Sequence[str], timeout_s: float) -> bool:
        try:
            self._lobby.wait(keys, timeout_s)
        except (OperationTimeout, MembershipError):  # the latter: no quorum for a while
            return False
        return True


def _conflict(seat: _Seat, others: Sequence[_Seat]) -> str | None:
    for other in others:
        if seat.fixed and other.fixed and seat.world != other.world:
            return f"one process of the run was told a world of {seat.world}, another one of {other.world}"
        if seat.rank is not None and seat.rank == other.rank:
            return f"two processes of the run were given rank {seat.rank}"
    return None


def _place(seats: Sequence[_Seat], me: str, generation: int, world: int) -> RankPlace | None:
    """Ranks that were given stay; the others are filled in the order of arrival."""
    given = {seat.rank for seat in seats}
    free = iter([rank for rank in range(world) if rank not in given])
    for seat in seats:
        rank = next(free) if seat.rank is None else seat.rank
        if seat.who == me:
            return RankPlace(generation, rank, world)
    return None


def _read(data: bytes) -> _SeatMap:
    if not data:
        return _SeatMap()
    return decode(_tables, data, "the table in the lobby cannot be read")


def _names(data: bytes) -> list[str]:
    return decode(_outcomes, data, "the outcome of a call in the lobby cannot be read")


_tables = msgspec.msgpack.Decoder(_SeatMap)
_outcomes = msgspec.msgpack.Decoder(list[str])
