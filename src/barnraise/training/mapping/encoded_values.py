"""Encoding of items and results: plain data and tensors as bytes, without pickle."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from barnraise.checkpoint.serialization import flatten, shapes, tensor_bytes, tensor_from_bytes, unflatten
from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError, RunError

MAX_RESULT_BYTES = 1 << 30
_MAX_TENSORS = 1 << 20
_HINT = "Return numbers, text, bytes, tensors, and lists, tuples and dicts of them."
_UNREADABLE = "the result of an item cannot be read"


class _EncodedValue(msgspec.Struct, frozen=True, array_like=True):
    """A value: its structure, and the bytes of its tensors in order."""

    skeleton: bytes
    contents: Annotated[tuple[bytes, ...], Meta(max_length=_MAX_TENSORS)] = ()


_values = msgspec.msgpack.Decoder(_EncodedValue)


def encode_value(value: Any, name: str) -> bytes:
    """Return the bytes of a value. Raise RunError, which names it, if it is more than data and tensors."""
    try:
        parts = flatten(value, name)
        contents = tuple(bytes(tensor_bytes(tensor)) for tensor in parts.tensors)
        encoded = msgspec.msgpack.encode(_EncodedValue(parts.skeleton, contents))
    except RunError as error:
        raise RunError(error.message, hint=_HINT) from error
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise RunError(f"{name} cannot be encoded: {error}", hint=_HINT) from error
    if len(encoded) > MAX_RESULT_BYTES:
        raise RunError(
            f"{name} has {len(encoded)} bytes; the limit is {MAX_RESULT_BYTES}",
            hint="Make the items smaller, or write the result into a file.",
        )
    return encoded


def decode_value(data: bytes) -> Any:
    """Return the value, with tensors on the CPU. Raise ProtocolError if the bytes are no value."""
    encoded = decode(_values, data, _UNREADABLE)
    forms = shapes(encoded.skeleton)
    if len(forms) != len(encoded.contents):
        raise ProtocolError(f"{_UNREADABLE}: a tensor is missing")
    tensors = [
        tensor_from_bytes(content, *form) for content, form in zip(encoded.contents, forms, strict=True)
    ]
    return unflatten(encoded.skeleton, tensors)
