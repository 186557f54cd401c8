"""The board by itself: what operations do, what is refused, and that a copy is a copy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import ProtocolError
from barnraise.local.board_messages import (
    LARGEST_VALUE,
    LOBBY,
    Add,
    Append,
    Check,
    CompareSet,
    Count,
    Delete,
    Denied,
    Done,
    Drop,
    Get,
    Length,
    MultiGet,
    MultiSet,
    Operation,
    Pop,
    Push,
    Result,
    Scope,
    Set,
)
from barnraise.runs import board as board_module
from barnraise.runs.board import MOST_SCOPES, Board
from tests.unit.changed_bytes import changed, read_or_refused

ME, YOU = b"m" * 16, b"y" * 16
FOUNDING = b"founding"


class Desk:
    """A board, and somebody who numbers what is asked of it."""

    def __init__(self) -> None:
        self.board = Board(FOUNDING)
        self.number = 0

    def do(self, kind: type, *fields: object, run: str = "r", generation: int = 1, **head: object) -> Result:
        self.number += 1
        serial = head.get("serial", self.number)
        operation: Operation = kind(
            Scope(run, generation), head.get("client", ME), serial, head.get("founding", b""), *fields
        )
        return self.board.apply(operation, self.number)

    def done(self, kind: type, *fields: object, **rest: object) -> Done:
        result = self.do(kind, *fields, **rest)  # type: ignore[arg-type]
        assert isinstance(result, Done), result
        return result

    def denied(self, kind: type, *fields: object, **rest: object) -> Denied:
        result = self.do(kind, *fields, **rest)  # type: ignore[arg-type]
        assert isinstance(result, Denied), result
        return result


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_values(desk: Desk) -> None:
    assert desk.done(Get, "k").missing == ("k",)
    desk.done(Set, "k", b"v")
    assert desk.done(Get, "k").value == b"v"
    desk.done(Append, "k", b"w")
    desk.done(Append, "new", b"x")
    assert desk.done(MultiGet, ("k", "new")).values == (b"vw", b"x")
    assert desk.done(MultiGet, ("k", "no", "new")).missing == ("no",)
    assert desk.done(Check, ("k", "no")).missing == ("no",)
    assert desk.done(Count).count == 2
    assert (desk.done(Delete, "k").count, desk.done(Delete, "k").count) == (1, 0)
    desk.done(MultiSet, ("a", "b"), (b"1", b"2"))
    assert desk.done(Count).count == 3
    assert desk.denied(MultiSet, ("a", "b"), (b"1",)).reason == "invalid"


def test_sums(desk: Desk) -> None:
    assert [desk.done(Add, "n", 2).count, desk.done(Add, "n", -5).count] == [2, -3]
    assert desk.done(Get, "n").value == b"-3"
    desk.done(Set, "e", b"")
    assert desk.done(Add, "e", 1).count == 1
    for wrong in (b"abc", b"1" * 5000, b"\xff"):
        desk.done(Set, "x", wrong)
        assert desk.denied(Add, "x", 1).reason == "invalid"
    desk.done(Set, "x", str(2**63 - 1).encode())
    assert "64 bits" in desk.denied(Add, "x", 1).message


def test_compare_and_set(desk: Desk) -> None:
    assert desk.done(CompareSet, "k", b"e", b"d").value == b"e", "as torch has it for a key that is not there"
    assert desk.done(Count).count == 0
    assert desk.done(CompareSet, "k", b"", b"d").value == b"d"
    assert desk.done(CompareSet, "k", b"x", b"y").value == b"d"
    assert desk.done(CompareSet, "k", b"d", b"y").value == b"y"


def test_queues(desk: Desk) -> None:
    assert desk.done(Pop, "q").missing == ("q",)
    desk.done(Push, "q", b"1")
    desk.done(Push, "q", b"2")
    assert desk.done(Check, ("q",)).missing == ()
    assert (desk.done(Length, "q").count, desk.done(Count).count) == (2, 0)
    assert [desk.done(Pop, "q").value, desk.done(Pop, "q").value] == [b"1", b"2"]
    assert desk.done(Check, ("q",)).missing == ("q",)
    assert desk.board._rooms[Scope("r", 1)].queues == {}


def test_a_repeated_write_is_answered_from_memory(desk: Desk) -> None:
    first = desk.done(Add, "n", 1, serial=7)
    assert desk.done(Add, "n", 1, serial=7) == first
    assert desk.done(Add, "n", 1, serial=7, client=YOU).count == 2, "another client is another one"
    assert desk.done(Add, "n", 1, serial=8).count == 3
    assert desk.denied(Add, "n", 1, serial=7).reason == "invalid", "one that was overtaken is not done again"
    assert desk.done(Get, "n").value == b"3"
    desk.done(Set, "x", b"abc", serial=9)
    refused = desk.denied(Add, "x", 1, serial=10)
    desk.done(Set, "x", b"5", client=YOU)
    assert desk.denied(Add, "x", 1, serial=10) == refused, "who was told no must not find it done later"


def test_generations(desk: Desk) -> None:
    desk.done(Set, "k", b"1", generation=1)
    assert desk.done(Get, "k", generation=2).missing == ("k",)
    assert desk.board.scopes == (Scope("r", 1),), "reading opens nothing"
    desk.done(Set, "k", b"", generation=LOBBY)
    desk.done(Set, "k", b"other", generation=1, run="other")
    desk.done(Set, "k", b"3", generation=3)
    assert set(desk.board.scopes) == {Scope("r", LOBBY), Scope("other", 1), Scope("r", 3)}
    for stale in (1, 2):
        assert desk.denied(Get, "k", generation=stale).reason == "stale"
        assert "generation 3" in desk.denied(Set, "k", b"", generation=stale).message
    desk.done(Drop, generation=3)
    assert desk.denied(Get, "k", generation=3).reason == "stale"
    desk.done(Set, "k", b"4", generation=4)
    desk.done(Drop, generation=LOBBY)
    desk.done(Set, "k", b"again", generation=LOBBY)


def test_another_history_is_refused(desk: Desk) -> None:
    desk.done(Set, "k", b"v", founding=FOUNDING)
    assert desk.denied(Get, "k", founding=b"anotherr").reason == "lost"
    assert desk.denied(Set, "k", b"", founding=b"anotherr").reason == "lost"


def test_scopes_are_bounded(desk: Desk) -> None:
    for number in range(MOST_SCOPES):
        desk.done(Set, "k", b"", run=f"run {number}")
    full = desk.denied(Set, "k", b"", run="one more")
    assert (full.reason, "64 scopes" in full.message) == ("full", True)
    assert not desk.board.has_room_for(Scope("one more", 1))
    desk.done(Set, "k", b"", run="run 5", generation=2)
    desk.done(Drop, run="run 6")
    desk.done(Set, "k", b"", run="one more")


def test_sizes_are_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "bytes" in desk.denied(Set, "ä" * 600, b"").message
    desk.done(Set, "k", bytes(LARGEST_VALUE))
    assert desk.denied(Append, "k", b"x").reason == "invalid"
    monkeypatch.setattr(board_module, "SCOPE_BYTES", LARGEST_VALUE + 100)
    assert desk.denied(Set, "l", bytes(200)).reason == "full"
    assert desk.denied(Push, "l", bytes(200)).reason == "full"
    assert desk.denied(MultiSet, ("l", "m"), (b"", bytes(200))).reason == "full"
    assert desk.done(Check, ("l",)).missing == ("l",), "all or none"
    assert desk.denied(CompareSet, "k", b"", b"x").reason == "full", "its answer would not fit"
    desk.done(Set, "k", b"small")
    desk.done(Set, "l", bytes(200))
    monkeypatch.setattr(board_module, "MOST_KEYS", 2)
    assert "keys" in desk.denied(Add, "m", 1).message
    desk.done(Delete, "l")
    desk.done(Add, "m", 1)
    monkeypatch.setattr(board_module, "MOST_CLIENTS", 1)
    assert "clients" in desk.denied(Set, "k", b"", client=YOU).message


def test_the_size_is_that_of_what_is_there(desk: Desk) -> None:
    desk.done(Set, "key", b"value")
    desk.done(Push, "queue", b"12")
    desk.done(Append, "key", b"s")
    desk.done(CompareSet, "cas", b"", b"1234", client=YOU)
    room = desk.board._rooms[Scope("r", 1)]
    assert room.size == 3 + 6 + 5 + 2 + 3 + 4 + 4, "what a client was told is remembered, and counts"
    desk.done(Delete, "key")
    desk.done(Pop, "queue")
    desk.done(Delete, "cas", client=YOU)
    assert room.size == 2, "the answer to the pop"
    desk.done(Add, "n", 1)
    assert room.size == 2


def test_long_answers_are_cut(desk: Desk) -> None:
    for key in "abc":
        desk.done(Set, key, key.encode() * (LARGEST_VALUE // 2))
    assert [value[:1] for value in desk.done(MultiGet, ("a", "b", "c")).values] == [b"a"]
    assert len(desk.done(MultiGet, tuple(f"x{n}" for n in range(5000))).missing) == 512


keys = st.sampled_from(["a", "b", "ключ"])
values = st.binary(max_size=5) | st.just(b"7")
fields = st.one_of(
    st.tuples(st.just(Set), keys, values),
    st.tuples(st.just(Append), keys, values),
    st.tuples(st.just(Add), keys, st.integers(-3, 3)),
    st.tuples(st.just(CompareSet), keys, values, values),
    st.tuples(st.just(Delete), keys),
    st.tuples(st.just(Push), keys, values),
    st.tuples(st.just(Pop), keys),
    st.tuples(st.just(Drop)),
)
calls = st.lists(st.tuples(fields, st.integers(LOBBY, 3), st.sampled_from([ME, YOU])), max_size=25)


@given(calls, calls)
@settings(max_examples=40, deadline=None)
def test_a_copy_goes_on_like_the_original(before: list[tuple], after: list[tuple]) -> None:  # type: ignore[type-arg]
    desk = Desk()
    for call, generation, client in before:
        desk.do(*call, generation=generation, client=client)
    copy = Desk()
    copy.board, copy.number = Board.of_image(desk.board.image()), desk.number
    sizes = [{scope: room.size for scope, room in one.board._rooms.items()} for one in (desk, copy)]
    assert sizes[0] == sizes[1]
    for call, generation, client in after:
        assert desk.do(*call, generation=generation, client=client) == copy.do(
            *call, generation=generation, client=client
        )
    assert desk.board.image() == copy.board.image()
    assert all(room.size >= 0 for room in desk.board._rooms.values())


def _images() -> list[bytes]:
    desk = Desk()
    images = [desk.board.image()]
    for call in ((Set, "k", b"value"), (Add, "n", 3), (Push, "q", b"item"), (Append, "k", b"more")):
        for generation, client in ((1, ME), (2, YOU)):
            desk.do(*call, generation=generation, client=client)
        images.append(desk.board.image())
    return images


@given(st.binary(max_size=100) | changed(_images()))
def test_a_board_of_changed_bytes_is_refused_or_goes_on_as_a_board(data: bytes) -> None:
    """What is read holds what it says, and can be written and used."""
    if read_or_refused(data, Board.of_image, Board.image, ProtocolError):
        desk = Desk()
        desk.board = Board.of_image(data)
        assert all(room.size >= 0 for room in desk.board._rooms.values())
        result = desk.do(Add, "n", 1, generation=1 << 20)
        assert isinstance(result, Done | Denied)
