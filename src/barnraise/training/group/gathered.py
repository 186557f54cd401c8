"""A tensor as a word that members gather: no more is believed of it than its bytes bear out."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from barnraise.checkpoint.serialization import as_bytes, dismantle, shapes
from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError

_LONGEST_SKELETON = 4096


class _Gathered(msgspec.Struct, frozen=True, array_like=True):
    skeleton: Annotated[bytes, Meta(max_length=_LONGEST_SKELETON)]
    content: bytes  # as long as a word of a member may be


def encode_tensor(value: torch.Tensor) -> bytes:
    parts = dismantle([value])
    return msgspec.msgpack.encode(_Gathered(parts.skeleton, as_bytes(parts.tensors[0]).tobytes()))


def decode_tensor(data: bytes) -> torch.Tensor:
    """ProtocolError if it is not what a member sends."""
    told = decode(_gathered, data, "what a member gathers cannot be read")
    found = shapes(told.skeleton)
    if len(found) != 1 or len(told.content) != math.prod(found[0][1]) * found[0][0].itemsize:
        raise ProtocolError("what a member gathers is not one tensor of the size that it says")
    dtype, shape = found[0]
    if not told.content:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(bytearray(told.content), dtype=dtype).reshape(shape)


_gathered = msgspec.msgpack.Decoder(_Gathered)
