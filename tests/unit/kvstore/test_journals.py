"""Journals: which names and operations are theirs, and what an entry may be."""

from __future__ import annotations

import pytest

from barnraise.agent_client.kv_messages import (
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
    Namespace,
    PopFromQueue,
    PushToQueue,
    QueueLength,
    ReadQueue,
    SetKey,
    SetKeys,
    WatchKey,
)
from barnraise.core.errors import AgentError, ProtocolError
from barnraise.kvstore.journals import ID, check_journal_name, decode_entry, refuse_journal_operation

QUEUE = "0123456789abcdef" * 2


def make(kind: type, *fields: object, name: str = "sweep", generation: int = LOBBY) -> object:
    return kind(Namespace(name, generation), bytes(16), 1, b"", *fields)


@pytest.mark.parametrize("name", ["default", "a", "Sweep-2.b_c", "7", "x" * 64])
def test_ordinary_name_is_accepted(name: str) -> None:
    assert check_journal_name(name) == name
    assert refuse_journal_operation(make(DropNamespace, name=name)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "a b", "-a", "@runs", "ä", "a\n", "x" * 65])
def test_other_name_is_rejected(name: str) -> None:
    with pytest.raises(AgentError, match="is not the name of a journal"):
        check_journal_name(name)
    assert refuse_journal_operation(make(DropNamespace, name=name))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "operation",
    [
        make(GetKey, ID),
        make(CompareAndSet, ID, b"", QUEUE.encode()),
        make(PushToQueue, QUEUE, b"{}"),
        make(ReadQueue, QUEUE, 3),
        make(DropNamespace),
    ],
    ids=lambda operation: type(operation).__name__,
)
def test_operation_of_a_journal_is_accepted(operation: object) -> None:
    assert refuse_journal_operation(operation) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "operation",
    [
        make(PushToQueue, QUEUE, b"{}", generation=0),
        make(PushToQueue, QUEUE, b"{}", generation=7),
        make(PushToQueue, ID, b"{}"),
        make(PushToQueue, QUEUE.upper(), b"{}"),
        make(PushToQueue, QUEUE + "\n", b"{}"),
        make(ReadQueue, ID, 0),
        make(PopFromQueue, QUEUE),
        make(QueueLength, QUEUE),
        make(GetKey, QUEUE),
        make(GetKeys, (ID,)),
        make(CheckKeys, (ID,)),
        make(CompareAndSet, "other", b"", QUEUE.encode()),
        make(CompareAndSet, ID, QUEUE.encode(), QUEUE.encode()),
        make(CompareAndSet, ID, b"", b"x" * 1000),
        make(CompareAndSet, ID, b"", b"\xff" * 32),
        make(SetKey, ID, QUEUE.encode()),
        make(SetKeys, (ID,), (QUEUE.encode(),)),
        make(AppendToKey, ID, b"x"),
        make(AddToKey, "n", 1),
        make(DeleteKey, ID),
        make(CountResult),
        make(WatchKey, (ID,), True),
    ],
    ids=lambda operation: type(operation).__name__,
)
def test_other_operation_is_rejected(operation: object) -> None:
    assert refuse_journal_operation(operation)  # type: ignore[arg-type]


def test_entry_is_an_object_of_json() -> None:
    assert decode_entry(b'{"op_code":4,"params":{"x":[1.5,null]}}', "a") == {
        "op_code": 4,
        "params": {"x": [1.5, None]},
    }


@pytest.mark.parametrize("entry", [b"", b"[]", b"3", b'{"a":', b"\xff", b"[" * 100_000, b"\x80\x04K\x01."])
def test_other_entry_is_rejected(entry: bytes) -> None:
    with pytest.raises(ProtocolError, match="an entry of journal 'a' cannot be read"):
        decode_entry(entry, "a")
