"""Packets name sizes and types that are checked before anything is allocated or run."""

from __future__ import annotations

import struct

import msgspec
import pytest

from barnraise.core.errors import ProtocolError, RunError
from barnraise.rpc import messages
from barnraise.rpc.messages import (
    FRAME_BYTES,
    MAX_BODY,
    MAX_HEAD,
    CallMessage,
    ErrorMessage,
    GoodbyeMessage,
    Message,
    ReferenceId,
    ReleaseMessage,
    ResultMessage,
    decode_message,
    encode_packet,
    read_sizes,
)

_CALL = CallMessage(3, "square", 1, ("key",), ((1, ReferenceId(2, 9)),), True, 5.0)


def read(packet: bytes | bytearray) -> tuple[Message, bytes]:
    view = memoryview(packet)
    head, body = read_sizes(view[:FRAME_BYTES]).split(view)
    return decode_message(head), bytes(body)


@pytest.mark.parametrize(
    "message",
    [
        _CALL,
        ResultMessage(1, ReferenceId(0, 0)),
        ErrorMessage(1, "E", "x"),
        ReleaseMessage(1, 2),
        GoodbyeMessage(),
    ],
)
@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES, 3 * FRAME_BYTES + 5])
def test_packet_comes_back_as_it_was(message: Message, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    packet = encode_packet(message, [body[:100], memoryview(body)[100:]])
    assert len(packet) >= FRAME_BYTES
    assert len(packet) == read_sizes(bytes(packet[:FRAME_BYTES])).total
    assert read(packet) == (message, body)


def test_body_over_the_limit_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_BODY", 1000)
    with pytest.raises(RunError, match=r"have 1001 B; the limit is 1000 B") as caught:
        encode_packet(GoodbyeMessage(), [bytes(1001)])
    assert "rpc.remote" in caught.value.hint


@pytest.mark.parametrize(("head", "body"), [(MAX_HEAD + 1, 0), (0, MAX_BODY + 1), (2**32 - 1, 2**64 - 1)])
def test_hostile_sizes_are_refused(head: int, body: int) -> None:
    frame = struct.pack("<IQ", head, body).ljust(FRAME_BYTES, b"\0")
    with pytest.raises(ProtocolError, match="is too large"):
        read_sizes(frame)


def test_frame_of_another_size_is_refused() -> None:
    with pytest.raises(ProtocolError, match="first frame"):
        read_sizes(bytes(FRAME_BYTES - 1))


@pytest.mark.parametrize(
    "value",
    [
        ["call", -1, "f", 0],
        ["call", 1, "f" * 201, 0],
        ["call", 1, "f", 129],
        ["call", 1, "f", 1, [], [[128, [0, 0]]]],
        ["call", 1, "f", 1, [], [[0, [-1, 0]]]],
        ["call", 1, "f", 0, [], [], False, 1e9],
        ["call", 1, "f", 0, ["a"] * 129],
        ["fetch", "1", 1],
        ["lease", 1, 1, 1 << 20],
        ["release", 1 << 53, 1],
        ["error", 1, "E", "x" * 4001],
        ["run", "import os"],
        ["result"],
        {"call": 1},
        5,
    ],
)
def test_malformed_head_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError, match="a message of a remote call cannot be read"):
        decode_message(msgspec.msgpack.encode(value))
