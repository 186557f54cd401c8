"""The store by itself: what operations do, what is refused, and that a copy is a copy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

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
    ReadQueue,
    Result,
    SetKey,
    SetKeys,
)
from barnraise.core.errors import ProtocolError
from barnraise.kvstore.journals import ID, JOURNALS
from barnraise.kvstore.store import IN_MEMORY, KeyValueStore, StoreRules

ME, YOU = b"m" * 16, b"y" * 16
FOUNDING = b"founding"


class NumberedStore:
    """Store together with a counter that numbers its operations."""

    def __init__(self, rules: StoreRules = IN_MEMORY) -> None:
        self.state = KeyValueStore(FOUNDING, rules)
        self.number = 0

    def do(self, kind: type, *fields: object, run: str = "r", generation: int = 1, **head: object) -> Result:
        self.number += 1
        serial = head.get("serial", self.number)
        operation: Operation = kind(
            Namespace(run, generation), head.get("client", ME), serial, head.get("founding", b""), *fields
        )
        return self.state.apply(operation, self.number)

    def done(self, kind: type, *fields: object, **rest: object) -> KvDone:
        result = self.do(kind, *fields, **rest)  # type: ignore[arg-type]
        assert isinstance(result, KvDone), result
        return result

    def denied(self, kind: type, *fields: object, **rest: object) -> KvDenied:
        result = self.do(kind, *fields, **rest)  # type: ignore[arg-type]
        assert isinstance(result, KvDenied), result
        return result


@pytest.fixture
def store() -> NumberedStore:
    return NumberedStore()


def test_set_get_append_delete_values(store: NumberedStore) -> None:
    assert store.done(GetKey, "k").missing == ("k",)
    store.done(SetKey, "k", b"v")
    assert store.done(GetKey, "k").value == b"v"
    store.done(AppendToKey, "k", b"w")
    store.done(AppendToKey, "new", b"x")
    assert store.done(GetKeys, ("k", "new")).values == (b"vw", b"x")
    assert store.done(GetKeys, ("k", "no", "new")).missing == ("no",)
    assert store.done(CheckKeys, ("k", "no")).missing == ("no",)
    assert store.done(CountResult).count == 2
    assert (store.done(DeleteKey, "k").count, store.done(DeleteKey, "k").count) == (1, 0)
    store.done(SetKeys, ("a", "b"), (b"1", b"2"))
    assert store.done(CountResult).count == 3
    assert store.denied(SetKeys, ("a", "b"), (b"1",)).reason == "invalid"


def test_add_to_key_counts_within_64_bits(store: NumberedStore) -> None:
    assert [store.done(AddToKey, "n", 2).count, store.done(AddToKey, "n", -5).count] == [2, -3]
    assert store.done(GetKey, "n").value == b"-3"
    store.done(SetKey, "e", b"")
    assert store.done(AddToKey, "e", 1).count == 1
    for wrong in (b"abc", b"1" * 5000, b"\xff"):
        store.done(SetKey, "x", wrong)
        assert store.denied(AddToKey, "x", 1).reason == "invalid"
    store.done(SetKey, "x", str(2**63 - 1).encode())
    assert "64 bits" in store.denied(AddToKey, "x", 1).message


def test_compare_and_set_writes_only_if_equal(store: NumberedStore) -> None:
    assert store.done(CompareAndSet, "k", b"e", b"d").value == b"e", (
        "as torch has it for a key that is not there"
    )
    assert store.done(CountResult).count == 0
    assert store.done(CompareAndSet, "k", b"", b"d").value == b"d"
    assert store.done(CompareAndSet, "k", b"x", b"y").value == b"d"
    assert store.done(CompareAndSet, "k", b"d", b"y").value == b"y"


def test_queues_push_pop_in_order(store: NumberedStore) -> None:
    assert store.done(PopFromQueue, "q").missing == ("q",)
    store.done(PushToQueue, "q", b"1")
    store.done(PushToQueue, "q", b"2")
    assert store.done(CheckKeys, ("q",)).missing == ()
    assert (store.done(QueueLength, "q").count, store.done(CountResult).count) == (2, 0)
    assert [store.done(PopFromQueue, "q").value, store.done(PopFromQueue, "q").value] == [b"1", b"2"]
    assert store.done(CheckKeys, ("q",)).missing == ("q",)
    assert store.state._namespaces[Namespace("r", 1)].queues == {}


def test_repeated_write_returns_the_first_result(store: NumberedStore) -> None:
    first = store.done(AddToKey, "n", 1, serial=7)
    assert store.done(AddToKey, "n", 1, serial=7) == first
    assert store.done(AddToKey, "n", 1, serial=7, client=YOU).count == 2, "another client has other serials"
    assert store.done(AddToKey, "n", 1, serial=8).count == 3
    assert store.denied(AddToKey, "n", 1, serial=7).reason == "invalid", (
        "a write that was overtaken is not applied again"
    )
    assert store.done(GetKey, "n").value == b"3"
    store.done(SetKey, "x", b"abc", serial=9)
    refused = store.denied(AddToKey, "x", 1, serial=10)
    store.done(SetKey, "x", b"5", client=YOU)
    assert store.denied(AddToKey, "x", 1, serial=10) == refused, "a denied write is not applied later"


def test_repeated_drop_leaves_a_namespace_that_came_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barnraise.kvstore.store._MAX_DROPS", 3)
    rules = replace(JOURNALS, current_queue="")
    store = NumberedStore(rules)
    store.done(PushToQueue, "q", b"old", generation=LOBBY, serial=1)
    dropped = store.done(DropNamespace, generation=LOBBY, serial=2)
    store.done(PushToQueue, "q", b"new", generation=LOBBY, client=YOU)
    store.state = KeyValueStore.from_snapshot(store.state.to_snapshot(), rules)
    assert store.done(DropNamespace, generation=LOBBY, serial=2) == dropped
    assert isinstance(store.do(PushToQueue, "q", b"old", generation=LOBBY, serial=1), KvDenied)
    assert store.done(ReadQueue, "q", 0, generation=LOBBY).values == (b"new",)
    assert store.done(DropNamespace, generation=LOBBY, serial=3).count == 1
    for number in range(5):
        store.done(DropNamespace, generation=LOBBY, client=bytes([number]) * 16)
    assert len(store.state._drops) == 3


def test_older_generation_is_fenced_and_dropped(store: NumberedStore) -> None:
    store.done(SetKey, "k", b"1", generation=1)
    assert store.done(GetKey, "k", generation=2).missing == ("k",)
    assert store.state.namespaces == (Namespace("r", 1),), "reading opens nothing"
    store.done(SetKey, "k", b"", generation=LOBBY)
    store.done(SetKey, "k", b"other", generation=1, run="other")
    store.done(SetKey, "k", b"3", generation=3)
    assert set(store.state.namespaces) == {Namespace("r", LOBBY), Namespace("other", 1), Namespace("r", 3)}
    for stale in (1, 2):
        assert store.denied(GetKey, "k", generation=stale).reason == "stale"
        assert "start 3" in store.denied(SetKey, "k", b"", generation=stale).message
    store.done(DropNamespace, generation=3)
    assert store.denied(GetKey, "k", generation=3).reason == "stale"
    store.done(SetKey, "k", b"4", generation=4)
    store.done(DropNamespace, generation=LOBBY)
    store.done(SetKey, "k", b"again", generation=LOBBY)


def test_other_history_is_rejected(store: NumberedStore) -> None:
    store.done(SetKey, "k", b"v", founding=FOUNDING)
    assert store.denied(GetKey, "k", founding=b"anotherr").reason == "lost"
    assert store.denied(SetKey, "k", b"", founding=b"anotherr").reason == "lost"


def test_namespaces_are_bounded(store: NumberedStore) -> None:
    for number in range(IN_MEMORY.max_namespaces):
        store.done(SetKey, "k", b"", run=f"run {number}")
    full = store.denied(SetKey, "k", b"", run="one more")
    assert (full.reason, "64 namespaces" in full.message) == ("full", True)
    assert not store.state.can_open(Namespace("one more", 1))
    store.done(SetKey, "k", b"", run="run 5", generation=2)
    store.done(DropNamespace, run="run 6")
    store.done(SetKey, "k", b"", run="one more")


def test_sizes_are_bounded(store: NumberedStore) -> None:
    assert "bytes" in store.denied(SetKey, "ä" * 600, b"").message
    store.done(SetKey, "k", bytes(LARGEST_VALUE))
    assert store.denied(AppendToKey, "k", b"x").reason == "invalid"
    store.state.rules = replace(IN_MEMORY, max_namespace_bytes=LARGEST_VALUE + 100)
    assert store.denied(SetKey, "l", bytes(200)).reason == "full"
    assert store.denied(PushToQueue, "l", bytes(200)).reason == "full"
    assert store.denied(SetKeys, ("l", "m"), (b"", bytes(200))).reason == "full"
    assert store.done(CheckKeys, ("l",)).missing == ("l",), "all or none"
    assert store.denied(CompareAndSet, "k", b"", b"x").reason == "full", "its answer would not fit"
    store.done(SetKey, "k", b"small")
    store.done(SetKey, "l", bytes(200))
    store.state.rules = replace(store.state.rules, max_keys=2)
    assert "keys" in store.denied(AddToKey, "m", 1).message
    store.done(DeleteKey, "l")
    store.done(AddToKey, "m", 1)
    store.state.rules = replace(store.state.rules, max_clients=1)
    assert "clients" in store.denied(SetKey, "k", b"", client=YOU).message


def test_size_equals_stored_contents(store: NumberedStore) -> None:
    store.done(SetKey, "key", b"value")
    store.done(PushToQueue, "queue", b"12")
    store.done(AppendToKey, "key", b"s")
    store.done(CompareAndSet, "cas", b"", b"1234", client=YOU)
    space = store.state._namespaces[Namespace("r", 1)]
    assert space.size == 3 + 6 + 5 + 2 + 3 + 4 + 4, "what a client was told is remembered, and counts"
    store.done(DeleteKey, "key")
    store.done(PopFromQueue, "queue")
    store.done(DeleteKey, "cas", client=YOU)
    assert space.size == 2, "the answer to the pop"
    store.done(AddToKey, "n", 1)
    assert space.size == 2


def test_long_answers_are_truncated(store: NumberedStore) -> None:
    for key in "abc":
        store.done(SetKey, key, key.encode() * (LARGEST_VALUE // 2))
    assert [value[:1] for value in store.done(GetKeys, ("a", "b", "c")).values] == [b"a"]
    assert len(store.done(GetKeys, tuple(f"x{n}" for n in range(5000))).missing) == 512


def test_queue_is_read_from_a_place_in_pieces(store: NumberedStore) -> None:
    assert store.done(ReadQueue, "q", 0).count == 0
    for number in range(6):
        store.done(PushToQueue, "q", bytes([number]) * (LARGEST_VALUE // 3))
    done = store.done(ReadQueue, "q", 1)
    assert (done.count, [value[0] for value in done.values]) == (6, [1, 2])
    assert store.done(ReadQueue, "q", 5).values[0][0] == 5
    for start in (6, 7, 1 << 60):
        assert (store.done(ReadQueue, "q", start).values, store.done(ReadQueue, "q", start).count) == ((), 6)


def test_rules_bound_journals_and_say_what_to_do() -> None:
    rules = replace(
        JOURNALS, max_namespaces=2, max_namespace_bytes=100, max_bytes=150, max_queue=3, current_queue=""
    )
    store = NumberedStore(rules)
    large = store.denied(PushToQueue, "q", bytes(rules.max_value + 1))
    assert (large.reason, "an entry of journal 'r'" in large.message) == ("invalid", True)
    for _ in range(3):
        store.done(PushToQueue, "q", bytes(20))
    assert "already holds 3 entries" in store.denied(PushToQueue, "q", b"x").message
    assert "journal 'r' already holds 100 B" in store.denied(PushToQueue, "p", bytes(60)).message
    assert "the journals of this cluster" in store.denied(PushToQueue, "q", bytes(99), run="s").message
    full = store.denied(PushToQueue, "q", b"", run="t")
    assert (full.reason, "delete_storage" in full.hint) == ("full", True)
    store.done(DropNamespace, generation=1)
    store.done(PushToQueue, "q", bytes(99), run="s")


def test_journal_takes_entries_only_for_its_current_queue() -> None:
    store = NumberedStore(JOURNALS)
    here = {"generation": LOBBY}
    assert store.denied(PushToQueue, "old", b"x", **here).reason == "stale"
    assert store.state.namespaces == (), "a denied entry opens no journal"
    store.done(CompareAndSet, ID, b"", b"old", **here)
    assert store.done(PushToQueue, "old", b"x", serial=50, **here).count == 1
    assert store.done(PushToQueue, "old", b"x", serial=50, **here).count == 1, "a retry is no second entry"
    store.done(DropNamespace, client=YOU, **here)
    denied = store.denied(PushToQueue, "old", b"y", serial=51, **here)
    assert (denied.reason, "was deleted" in denied.message) == ("stale", True)
    assert "Open the storage again" in denied.hint
    assert store.state.namespaces == ()
    store.done(CompareAndSet, ID, b"", b"new", client=YOU, **here)
    assert store.denied(PushToQueue, "old", b"y", serial=52, **here).reason == "stale"
    assert store.done(ReadQueue, "old", 0, **here).count == 0
    assert store.done(PushToQueue, "new", b"y", serial=53, **here).count == 1


def test_snapshot_beyond_the_rules_is_rejected() -> None:
    store = NumberedStore()
    for number in range(3):
        store.done(PushToQueue, "q", bytes(200), run=f"run {number}")
        store.done(PushToQueue, "q", b"", run=f"run {number}")
    snapshot = store.state.to_snapshot()
    KeyValueStore.from_snapshot(snapshot)
    for limits in ({"max_namespaces": 2}, {"max_namespace_bytes": 90}, {"max_queue": 1}, {"max_keys": 0}):
        with pytest.raises(ProtocolError):
            KeyValueStore.from_snapshot(snapshot, replace(IN_MEMORY, **limits))


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
def test_restored_snapshot_behaves_like_the_original(before: list[tuple], after: list[tuple]) -> None:  # type: ignore[type-arg]
    store = NumberedStore()
    for call, generation, client in before:
        store.do(*call, generation=generation, client=client)
    copy = NumberedStore()
    copy.state, copy.number = KeyValueStore.from_snapshot(store.state.to_snapshot()), store.number
    sizes = [{scope: space.size for scope, space in each.state._namespaces.items()} for each in (store, copy)]
    assert sizes[0] == sizes[1]
    for call, generation, client in after:
        assert store.do(*call, generation=generation, client=client) == copy.do(
            *call, generation=generation, client=client
        )
    assert store.state.to_snapshot() == copy.state.to_snapshot()
    assert all(space.size >= 0 for space in store.state._namespaces.values())


@given(st.binary(max_size=100))
def test_random_bytes_are_rejected_or_make_a_valid_store(data: bytes) -> None:
    try:
        KeyValueStore.from_snapshot(data)
    except ProtocolError:
        pass
