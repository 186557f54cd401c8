"""The board by itself: what operations do, what is refused, and that a copy is a copy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.agent_client.kv_messages import (
    LARGEST_VALUE,
    LOBBY,
    AddToKey,
    AppendToKey,
    CheckKeys,
    CompareAndSet,
    CountResult,
    DeleteKey,
    DropNamespace,
    GetKey,
    GetKeys,
    KvDenied,
    KvDone,
    Namespace,
    Operation,
    PopFromQueue,
    PushToQueue,
    QueueLength,
    Result,
    SetKey,
    SetKeys,
)
from barnraise.core.errors import ProtocolError
from barnraise.kvstore import store as board_module
from barnraise.kvstore.store import MOST_SCOPES, KeyValueStore

ME, YOU = b"m" * 16, b"y" * 16
FOUNDING = b"founding"


class Desk:
    """A board, and somebody who numbers what is asked of it."""

    def __init__(self) -> None:
        self.board = KeyValueStore(FOUNDING)
        self.number = 0

    def do(self, kind: type, *fields: object, run: str = "r", generation: int = 1, **head: object) -> Result:
        self.number += 1
        serial = head.get("serial", self.number)
        operation: Operation = kind(
            Namespace(run, generation), head.get("client", ME), serial, head.get("founding", b""), *fields
        )
        return self.board.apply(operation, self.number)

    def done(self, kind: type, *fields: object, **rest: object) -> KvDone:
        result = self.do(kind, *fields, **rest)  # type: ignore[arg-type]
        assert isinstance(result, KvDone), result
        return result

    def denied(self, kind: type, *fields: object, **rest: object) -> KvDenied:
        result = self.do(kind, *fields, **rest)  # type: ignore[arg-type]
        assert isinstance(result, KvDenied), result
        return result


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_values(desk: Desk) -> None:
    assert desk.done(GetKey, "k").missing == ("k",)
    desk.done(SetKey, "k", b"v")
    assert desk.done(GetKey, "k").value == b"v"
    desk.done(AppendToKey, "k", b"w")
    desk.done(AppendToKey, "new", b"x")
    assert desk.done(GetKeys, ("k", "new")).values == (b"vw", b"x")
    assert desk.done(GetKeys, ("k", "no", "new")).missing == ("no",)
    assert desk.done(CheckKeys, ("k", "no")).missing == ("no",)
    assert desk.done(CountResult).count == 2
    assert (desk.done(DeleteKey, "k").count, desk.done(DeleteKey, "k").count) == (1, 0)
    desk.done(SetKeys, ("a", "b"), (b"1", b"2"))
    assert desk.done(CountResult).count == 3
    assert desk.denied(SetKeys, ("a", "b"), (b"1",)).reason == "invalid"


def test_sums(desk: Desk) -> None:
    assert [desk.done(AddToKey, "n", 2).count, desk.done(AddToKey, "n", -5).count] == [2, -3]
    assert desk.done(GetKey, "n").value == b"-3"
    desk.done(SetKey, "e", b"")
    assert desk.done(AddToKey, "e", 1).count == 1
    for wrong in (b"abc", b"1" * 5000, b"\xff"):
        desk.done(SetKey, "x", wrong)
        assert desk.denied(AddToKey, "x", 1).reason == "invalid"
    desk.done(SetKey, "x", str(2**63 - 1).encode())
    assert "64 bits" in desk.denied(AddToKey, "x", 1).message


def test_compare_and_set(desk: Desk) -> None:
    assert desk.done(CompareAndSet, "k", b"e", b"d").value == b"e", (
        "as torch has it for a key that is not there"
    )
    assert desk.done(CountResult).count == 0
    assert desk.done(CompareAndSet, "k", b"", b"d").value == b"d"
    assert desk.done(CompareAndSet, "k", b"x", b"y").value == b"d"
    assert desk.done(CompareAndSet, "k", b"d", b"y").value == b"y"


def test_queues(desk: Desk) -> None:
    assert desk.done(PopFromQueue, "q").missing == ("q",)
    desk.done(PushToQueue, "q", b"1")
    desk.done(PushToQueue, "q", b"2")
    assert desk.done(CheckKeys, ("q",)).missing == ()
    assert (desk.done(QueueLength, "q").count, desk.done(CountResult).count) == (2, 0)
    assert [desk.done(PopFromQueue, "q").value, desk.done(PopFromQueue, "q").value] == [b"1", b"2"]
    assert desk.done(CheckKeys, ("q",)).missing == ("q",)
    assert desk.board._rooms[Namespace("r", 1)].queues == {}


def test_a_repeated_write_is_answered_from_memory(desk: Desk) -> None:
    first = desk.done(AddToKey, "n", 1, serial=7)
    assert desk.done(AddToKey, "n", 1, serial=7) == first
    assert desk.done(AddToKey, "n", 1, serial=7, client=YOU).count == 2, "another client is another one"
    assert desk.done(AddToKey, "n", 1, serial=8).count == 3
    assert desk.denied(AddToKey, "n", 1, serial=7).reason == "invalid", (
        "one that was overtaken is not done again"
    )
    assert desk.done(GetKey, "n").value == b"3"
    desk.done(SetKey, "x", b"abc", serial=9)
    refused = desk.denied(AddToKey, "x", 1, serial=10)
    desk.done(SetKey, "x", b"5", client=YOU)
    assert desk.denied(AddToKey, "x", 1, serial=10) == refused, "who was told no must not find it done later"


def test_generations(desk: Desk) -> None:
    desk.done(SetKey, "k", b"1", generation=1)
    assert desk.done(GetKey, "k", generation=2).missing == ("k",)
    assert desk.board.scopes == (Namespace("r", 1),), "reading opens nothing"
    desk.done(SetKey, "k", b"", generation=LOBBY)
    desk.done(SetKey, "k", b"other", generation=1, run="other")
    desk.done(SetKey, "k", b"3", generation=3)
    assert set(desk.board.scopes) == {Namespace("r", LOBBY), Namespace("other", 1), Namespace("r", 3)}
    for stale in (1, 2):
        assert desk.denied(GetKey, "k", generation=stale).reason == "stale"
        assert "generation 3" in desk.denied(SetKey, "k", b"", generation=stale).message
    desk.done(DropNamespace, generation=3)
    assert desk.denied(GetKey, "k", generation=3).reason == "stale"
    desk.done(SetKey, "k", b"4", generation=4)
    desk.done(DropNamespace, generation=LOBBY)
    desk.done(SetKey, "k", b"again", generation=LOBBY)


def test_another_history_is_refused(desk: Desk) -> None:
    desk.done(SetKey, "k", b"v", founding=FOUNDING)
    assert desk.denied(GetKey, "k", founding=b"anotherr").reason == "lost"
    assert desk.denied(SetKey, "k", b"", founding=b"anotherr").reason == "lost"


def test_scopes_are_bounded(desk: Desk) -> None:
    for number in range(MOST_SCOPES):
        desk.done(SetKey, "k", b"", run=f"run {number}")
    full = desk.denied(SetKey, "k", b"", run="one more")
    assert (full.reason, "64 scopes" in full.message) == ("full", True)
    assert not desk.board.has_room_for(Namespace("one more", 1))
    desk.done(SetKey, "k", b"", run="run 5", generation=2)
    desk.done(DropNamespace, run="run 6")
    desk.done(SetKey, "k", b"", run="one more")


def test_sizes_are_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "bytes" in desk.denied(SetKey, "ä" * 600, b"").message
    desk.done(SetKey, "k", bytes(LARGEST_VALUE))
    assert desk.denied(AppendToKey, "k", b"x").reason == "invalid"
    monkeypatch.setattr(board_module, "SCOPE_BYTES", LARGEST_VALUE + 100)
    assert desk.denied(SetKey, "l", bytes(200)).reason == "full"
    assert desk.denied(PushToQueue, "l", bytes(200)).reason == "full"
    assert desk.denied(SetKeys, ("l", "m"), (b"", bytes(200))).reason == "full"
    assert desk.done(CheckKeys, ("l",)).missing == ("l",), "all or none"
    assert desk.denied(CompareAndSet, "k", b"", b"x").reason == "full", "its answer would not fit"
    desk.done(SetKey, "k", b"small")
    desk.done(SetKey, "l", bytes(200))
    monkeypatch.setattr(board_module, "MOST_KEYS", 2)
    assert "keys" in desk.denied(AddToKey, "m", 1).message
    desk.done(DeleteKey, "l")
    desk.done(AddToKey, "m", 1)
    monkeypatch.setattr(board_module, "MOST_CLIENTS", 1)
    assert "clients" in desk.denied(SetKey, "k", b"", client=YOU).message


def test_the_size_is_that_of_what_is_there(desk: Desk) -> None:
    desk.done(SetKey, "key", b"value")
    desk.done(PushToQueue, "queue", b"12")
    desk.done(AppendToKey, "key", b"s")
    desk.done(CompareAndSet, "cas", b"", b"1234", client=YOU)
    room = desk.board._rooms[Namespace("r", 1)]
    assert room.size == 3 + 6 + 5 + 2 + 3 + 4 + 4, "what a client was told is remembered, and counts"
    desk.done(DeleteKey, "key")
    desk.done(PopFromQueue, "queue")
    desk.done(DeleteKey, "cas", client=YOU)
    assert room.size == 2, "the answer to the pop"
    desk.done(AddToKey, "n", 1)
    assert room.size == 2


def test_long_answers_are_cut(desk: Desk) -> None:
    for key in "abc":
        desk.done(SetKey, key, key.encode() * (LARGEST_VALUE // 2))
    assert [value[:1] for value in desk.done(GetKeys, ("a", "b", "c")).values] == [b"a"]
    assert len(desk.done(GetKeys, tuple(f"x{n}" for n in range(5000))).missing) == 512


keys = st.sampled_from(["a", "b", "ключ"])
values = st.binary(max_size=5) | st.just(b"7")
fields = st.one_of(
    st.tuples(st.just(SetKey), keys, values),
    st.tuples(st.just(AppendToKey), keys, values),
    st.tuples(st.just(AddToKey), keys, st.integers(-3, 3)),
    st.tuples(st.just(CompareAndSet), keys, values, values),
    st.tuples(st.just(DeleteKey), keys),
    st.tuples(st.just(PushToQueue), keys, values),
    st.tuples(st.just(PopFromQueue), keys),
    st.tuples(st.just(DropNamespace)),
)
calls = st.lists(st.tuples(fields, st.integers(LOBBY, 3), st.sampled_from([ME, YOU])), max_size=25)


@given(calls, calls)
@settings(max_examples=40, deadline=None)
def test_a_copy_goes_on_like_the_original(before: list[tuple], after: list[tuple]) -> None:  # type: ignore[type-arg]
    desk = Desk()
    for call, generation, client in before:
        desk.do(*call, generation=generation, client=client)
    copy = Desk()
    copy.board, copy.number = KeyValueStore.of_image(desk.board.image()), desk.number
    sizes = [{scope: room.size for scope, room in one.board._rooms.items()} for one in (desk, copy)]
    assert sizes[0] == sizes[1]
    for call, generation, client in after:
        assert desk.do(*call, generation=generation, client=client) == copy.do(
            *call, generation=generation, client=client
        )
    assert desk.board.image() == copy.board.image()
    assert all(room.size >= 0 for room in desk.board._rooms.values())


@given(st.binary(max_size=100))
def test_no_bytes_make_a_wrong_board(data: bytes) -> None:
    try:
        KeyValueStore.of_image(data)
    except ProtocolError:
        pass
