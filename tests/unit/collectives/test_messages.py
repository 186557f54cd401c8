"""Channel between a worker and its communication process: whole messages, however the bytes arrive."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.messages import (
    MAX_MESSAGE,
    AskStatistics,
    CloseGroup,
    Command,
    Failure,
    GroupMember,
    Inbox,
    OpenGroup,
    OperationFailed,
    OperationFinished,
    OperationSpec,
    StartOperation,
    decode_specification,
    encode,
    encode_specification,
)
from barnraise.collectives.ops.dtypes import by_name
from tests.unit.changed_bytes import changed, read_or_refused

FLOAT32 = by_name("float32").code
SPECIFICATION = OperationSpec("all_reduce", FLOAT32, "sum", -1, "ring", (4096,), 65536, 2)
COMMANDS: list[Command] = [
    OpenGroup(1, 3, "fresh", 0, (GroupMember(b"w" * 16, 52416, ("10.0.0.1",)),), 60.0, CostTable.default()),
    StartOperation(2, 9, 5, SPECIFICATION, 0, 256, 4096, 60.0),
    StartOperation(3, 9, 6, SPECIFICATION, 0, 256, 4096, 60.0, ((1, 2), (3, 4))),
    CloseGroup(9),
    AskStatistics(4),
]


@given(st.lists(st.integers(1, 400), max_size=30))
def test_inbox_returns_whole_messages_for_any_split(cuts: list[int]) -> None:
    data = b"".join(encode(command) for command in COMMANDS)
    inbox, received = Inbox(commands=True), []
    for size in cuts:
        received += inbox.feed(data[:size])
        data = data[size:]
    received += inbox.feed(data)
    assert received == COMMANDS


def test_reply_is_not_decoded_as_command() -> None:
    reply = OperationFailed(1, Failure("peer-lost", "it died", peer=2))
    assert Inbox(commands=False).feed(encode(reply) + encode(OperationFinished(2, 5))) == [
        reply,
        OperationFinished(2, 5),
    ]
    with pytest.raises(msgspec.ValidationError):
        Inbox(commands=True).feed(encode(reply))


def test_oversized_message_is_rejected() -> None:
    with pytest.raises(ValueError, match="bytes"):
        Inbox(commands=True).feed((MAX_MESSAGE + 1).to_bytes(4, "little"))


def test_equal_specifications_encode_to_equal_bytes() -> None:
    encoded = encode_specification(SPECIFICATION)
    assert decode_specification(encoded) == SPECIFICATION
    assert encoded != encode_specification(msgspec.structs.replace(SPECIFICATION, reduction="max"))


@given(st.binary(max_size=200) | changed([encode_specification(SPECIFICATION)]))
def test_decode_specification_of_mutated_bytes_returns_or_raises(data: bytes) -> None:
    if read_or_refused(data, decode_specification, encode_specification, (ValueError, RecursionError)):
        assert decode_specification(data).describe()


def test_specification_describes_itself_in_words() -> None:
    assert SPECIFICATION.describe() == "all_reduce of 4096 bytes float32 sum by ring"
    longer = OperationSpec("reduce", FLOAT32, "sum", 2, "tree", (1, 2, 3, 4, 5), 65536, 2)
    assert longer.describe() == "reduce of 1+2+3+4... bytes float32 sum root 2 by tree"
    stranger = OperationSpec("reduce", 99, "sum", 2, "tree", (), 65536, 2)
    assert stranger.describe() == "reduce of 0 bytes of an unknown type sum root 2 by tree"
