"""Serialization of single tensors that workers gather."""

from __future__ import annotations

import msgspec
import pytest
import torch

from barnraise.checkpoint.serialization import decode_tensor, encode_tensor, tensor_bytes, tensor_from_bytes
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


def test_tensor_bytes_do_not_depend_on_strides_or_lazy_signs() -> None:
    single = torch.arange(4.0)[1:2].as_strided((1,), (3,))
    assert tensor_bytes(single) == tensor_bytes(torch.tensor([1.0]))
    pair = torch.tensor([1 + 2j, 3 - 4j])
    assert tensor_bytes(pair.conj()) == tensor_bytes(torch.tensor([1 - 2j, 3 + 4j]))


def test_tensor_from_bytes_of_other_size_is_rejected() -> None:
    assert torch.equal(tensor_from_bytes(bytes(8), torch.int32, (2, 1)), torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(ProtocolError, match="size"):
        tensor_from_bytes(bytes(8), torch.float32, (1 << 40,))
