"""A nested state of plain values and tensors, taken apart into a small skeleton and a list of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy
import torch
from blake3 import blake3

from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError, RunError

_MOST_DEPTH = 64
_MOST_TENSORS = 1 << 20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128),
    )
}
_PLAIN = (bool, int, float, str, bytes, type(None))


class FlatState(NamedTuple):
    """``skeleton`` says what it is made of, ``tensors`` are its contents in order, on the CPU or not."""

    skeleton: bytes
    tensors: list[torch.Tensor]


def dismantle(state: Any) -> FlatState:
    """RunError, with the place, for anything that is neither plain nor a dense tensor."""
    tensors: list[torch.Tensor] = []
    tree = _take_apart(state, tensors, "state", 0)
    return FlatState(msgspec.msgpack.encode(tree), tensors)


def shapes(skeleton: bytes) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """What tensors belong to it, so that room can be made for them; ProtocolError if it is no skeleton."""
    found: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {}

    def note(place: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        found[place] = (dtype, shape)

    _put_together(_decoded(skeleton), note, 0)
    if sorted(found) != list(range(len(found))):
        raise ProtocolError("a state names its tensors in a wrong way")
    return [found[place] for place in range(len(found))]


def assemble(skeleton: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """What was taken apart."""

    def take(place: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if place >= len(tensors) or tensors[place].dtype != dtype or tuple(tensors[place].shape) != shape:
            raise ProtocolError(f"tensor {place} of a state is not what its skeleton says")
        return tensors[place]

    return _put_together(_decoded(skeleton), take, 0)


def digest(parts: FlatState) -> bytes:
    """Of every byte; the same on machines that hold the same bits."""
    hasher = blake3(parts.skeleton)
    for tensor in parts.tensors:
        hasher.update(as_bytes(tensor))
    return hasher.digest()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The contents of a tensor, without a copy where it is dense and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _take_apart(value: Any, tensors: list[torch.Tensor], where: str, depth: int) -> Any:
    if depth > _MOST_DEPTH:
        raise RunError(f"{where} is nested too deeply to be saved", hint="Flatten it.")
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or str(value.dtype).removeprefix("torch.") not in _DTYPES:
            raise RunError(f"{where} is a {value.dtype} tensor that cannot be saved", hint="Convert it.")
        tensors.append(value.detach())
        return ["t", len(tensors) - 1, str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise RunError(f"{where} has the key {key!r}", hint="Use words or numbers as keys.")
        pairs = value.items()
        return ["d", [[key, _take_apart(one, tensors, f"{where}[{key!r}]", depth + 1)] for key, one in pairs]]
    if isinstance(value, list | tuple):
        named = ((f"{where}[{place}]", one) for place, one in enumerate(value))
        parts = [_take_apart(one, tensors, name, depth + 1) for name, one in named]
        return ["l" if isinstance(value, list) else "u", parts]
    if isinstance(value, numpy.generic):  # some are floats, too, but not for msgspec
        value = value.item()
    if isinstance(value, _PLAIN):
        return ["p", value]
    raise RunError(
        f"{where} is a {type(value).__name__}, which cannot be saved",
        hint="Keep plain values and tensors in the state; see run.track for objects of your own.",
    )


def _put_together(tree: Any, take: Any, depth: int) -> Any:
    if depth > _MOST_DEPTH or not isinstance(tree, list) or len(tree) < 2:
        raise ProtocolError("a state cannot be read")
    match tree:
        case ["t", int(place), str(name), list(shape)] if name in _DTYPES and 0 <= place < _MOST_TENSORS:
            if not all(isinstance(one, int) and one >= 0 for one in shape) or math.prod(shape) > 1 << 42:
                raise ProtocolError("a tensor of a state has a wrong shape")
            return take(place, _DTYPES[name], tuple(shape))
        case ["d", list(pairs)] if all(_is_pair(one) for one in pairs):
            return {key: _put_together(one, take, depth + 1) for key, one in pairs}
        case ["l", list(items)]:
            return [_put_together(one, take, depth + 1) for one in items]
        case ["u", list(items)]:
            return tuple(_put_together(one, take, depth + 1) for one in items)
        case ["p", value]:
            return value
        case _:
            raise ProtocolError("a state has a part of an unknown kind")


def _is_pair(one: Any) -> bool:
    return isinstance(one, list) and len(one) == 2 and isinstance(one[0], str | int)


def _decoded(skeleton: bytes) -> Any:
    return decode(_trees, skeleton, "a state cannot be read")


_trees: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
