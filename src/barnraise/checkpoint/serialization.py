"""Serialization of a nested state: flattened into a small skeleton and a list of tensors, without pickle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy
import torch
from blake3 import blake3
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError, RunError

_MAX_DEPTH = 64
_MAX_TENSORS = 1 << 20
_MAX_SHORT_SKELETON = 4096
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
    """A state as a skeleton, which describes its structure, and its tensors in order, on any device."""

    skeleton: bytes
    tensors: list[torch.Tensor]


def flatten(state: Any, name: str = "state") -> FlatState:
    """Flatten a nested state. Raise RunError, with the path, for a value that cannot be serialized."""
    tensors: list[torch.Tensor] = []
    tree = _flatten(state, tensors, name, 0)
    return FlatState(msgspec.msgpack.encode(tree), tensors)


def shapes(skeleton: bytes) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of all tensors of a skeleton. Raise ProtocolError if it is invalid."""
    forms: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {}

    def note(place: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        forms[place] = (dtype, shape)

    _unflatten(_decode_tree(skeleton), note, 0)
    if sorted(forms) != list(range(len(forms))):
        raise ProtocolError("the tensors of a state are not numbered from 0")
    return [forms[place] for place in range(len(forms))]


def unflatten(skeleton: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Rebuild a nested state. Raise ProtocolError if tensors and skeleton do not match."""

    def take(place: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if place >= len(tensors) or tensors[place].dtype != dtype or tuple(tensors[place].shape) != shape:
            raise ProtocolError(f"tensor {place} of a state does not match its skeleton")
        return tensors[place]

    return _unflatten(_decode_tree(skeleton), take, 0)


def digest(parts: FlatState) -> bytes:
    """Hash every byte of a state; equal on machines that hold the same bits."""
    hasher = blake3(parts.skeleton)
    for tensor in parts.tensors:
        hasher.update(tensor_bytes(tensor))
    return hasher.digest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A single number may have any stride, and torch looks at bytes only where that is 1.
    flat = plain.as_strided((plain.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_from_bytes(content: bytes | memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a new tensor with the given bytes. Raise ProtocolError if they do not have its size."""
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ProtocolError("the bytes of a tensor do not have its size")
    flat = torch.empty(len(content), dtype=torch.uint8)  # memory of torch's own, aligned as it likes
    flat.numpy()[:] = numpy.frombuffer(content, numpy.uint8)
    return flat.view(dtype).reshape(tuple(shape))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def _flatten(value: Any, tensors: list[torch.Tensor], where: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise RunError(f"{where} is nested too deeply to be saved", hint="Flatten it.")
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or str(value.dtype).removeprefix("torch.") not in _DTYPES:
            raise RunError(f"{where} is a {value.dtype} tensor that cannot be saved", hint="Convert it.")
        tensors.append(value.detach())
        return ["t", len(tensors) - 1, str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise RunError(f"{where} has the key {key!r}", hint="Use strings or integers as keys.")
        pairs = value.items()
        return ["d", [[key, _flatten(item, tensors, f"{where}[{key!r}]", depth + 1)] for key, item in pairs]]
    if isinstance(value, list | tuple):
        named = ((f"{where}[{place}]", item) for place, item in enumerate(value))
        parts = [_flatten(item, tensors, name, depth + 1) for name, item in named]
        return ["l" if isinstance(value, list) else "u", parts]
    if isinstance(value, numpy.generic):  # msgspec cannot encode it, even if it is a float
        value = value.item()
    if isinstance(value, _PLAIN):
        return ["p", value]
    raise RunError(
        f"{where} is a {type(value).__name__}, which cannot be saved",
        hint="Keep plain values and tensors in the state; see run.track for objects of your own.",
    )


def _unflatten(tree: Any, take: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH or not isinstance(tree, list) or len(tree) < 2:
        raise ProtocolError("a state cannot be read")
    match tree:
        case ["t", int(place), str(name), list(shape)] if name in _DTYPES and 0 <= place < _MAX_TENSORS:
            if (
                not all(isinstance(length, int) and length >= 0 for length in shape)
                or math.prod(shape) > 1 << 42
            ):
                raise ProtocolError("a tensor of a state has an invalid shape")
            return take(place, _DTYPES[name], tuple(shape))
        case ["d", list(pairs)] if all(_is_pair(pair) for pair in pairs):
            return {key: _unflatten(item, take, depth + 1) for key, item in pairs}
        case ["l", list(items)]:
            return [_unflatten(item, take, depth + 1) for item in items]
        case ["u", list(items)]:
            return tuple(_unflatten(item, take, depth + 1) for item in items)
        case ["p", value]:
            return value
        case _:
            raise ProtocolError("a state has a value of an unknown kind")


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str | int)


def _decode_tree(skeleton: bytes) -> Any:
    return decode(_trees, skeleton, "a state cannot be read")


_trees: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


# single tensors, as workers gather them


class _EncodedTensor(msgspec.Struct, frozen=True, array_like=True):
    skeleton: Annotated[bytes, Meta(max_length=_MAX_SHORT_SKELETON)]
    content: bytes  # limited by the size of a gathered message


def encode_tensor(value: torch.Tensor) -> bytes:
    """Encode a tensor as a message for other workers."""
    parts = flatten([value])
    return msgspec.msgpack.encode(_EncodedTensor(parts.skeleton, tensor_bytes(parts.tensors[0]).tobytes()))


def decode_tensor(data: bytes) -> torch.Tensor:
    """Decode another worker's tensor. Raise ProtocolError if size and shape do not match."""
    encoded = decode(_encoded_tensors, data, "a gathered tensor cannot be read")
    forms = shapes(encoded.skeleton)
    if len(forms) != 1:
        raise ProtocolError("a gathered message is not one tensor")
    return tensor_from_bytes(encoded.content, *forms[0])


_encoded_tensors = msgspec.msgpack.Decoder(_EncodedTensor)
