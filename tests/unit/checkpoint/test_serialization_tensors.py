"""Serialization of single tensors that workers gather."""

from __future__ import annotations

import msgspec
import pytest
import torch

from barnraise.checkpoint.serialization import decode_tensor, encode_tensor
from barnraise.core.errors import ProtocolError


@pytest.mark.parametrize(
    "value", [torch.arange(6).reshape(2, 3), torch.zeros(0, 4), torch.ones(3).bfloat16()]
)
def test_encoded_tensor_round_trips(value: torch.Tensor) -> None:
    decoded = decode_tensor(encode_tensor(value))
    assert decoded.dtype == value.dtype
    assert torch.equal(decoded, value)


@pytest.mark.parametrize(
    "word",
    [
        b"",
        b"\x80\x04}.",
        msgspec.msgpack.encode([b"", b""]),
        msgspec.msgpack.encode(["skeleton", 5]),
        msgspec.msgpack.encode([msgspec.msgpack.encode(["l", [["t", 0, "float32", [1 << 40]]]]), bytes(4)]),
        msgspec.msgpack.encode([msgspec.msgpack.encode(["l", []]), b""]),
        msgspec.msgpack.encode([msgspec.msgpack.encode(["d", [1]]), b""]),
        msgspec.msgpack.encode([msgspec.msgpack.encode(["d", [[[], ["p", 1]]]]), b""]),
        msgspec.msgpack.encode([bytes(5000), b""]),
    ],
)
def test_invalid_encoded_tensor_is_rejected(word: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_tensor(word)
