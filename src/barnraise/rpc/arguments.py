"""Arguments and results of remote calls: plain data and tensors as bytes, and references in their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from barnraise.core.errors import ProtocolError, RunError, ShippingError
from barnraise.rpc.messages import MAX_ARGUMENTS, CallMessage
from barnraise.rpc.references import RemoteReference
from barnraise.rpc.registry import MAX_NAME
from barnraise.worker.launch.serializer import Content, decode_values, encode_values


class EncodedArguments(NamedTuple):
    """Arguments of a call: values as bytes, and references by their places."""

    names: tuple[str, ...]
    contents: list[Content]
    references: dict[int, RemoteReference]


def encode_arguments(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> EncodedArguments:
    """Encode the arguments of a call. Raise RunError, with the argument, for a value that cannot be sent."""
    named = [(f"argument {place + 1}", value) for place, value in enumerate(args)]
    named += [(f"the argument {name}", value) for name, value in kwargs.items()]
    if len(named) > MAX_ARGUMENTS or any(len(name) > MAX_NAME for name in kwargs):
        raise RunError(
            f"{function} is called with {len(named)} arguments; the limits are {MAX_ARGUMENTS}, "
            f"and {MAX_NAME} letters for a name",
            hint="Put them into a list or a dict.",
        )
    references = {
        place: value for place, (_, value) in enumerate(named) if isinstance(value, RemoteReference)
    }
    values = [
        (f"{name} of {function}", value)
        for name, value in named
        if not isinstance(value, RemoteReference)
    ]
    return EncodedArguments(tuple(kwargs), encode_values(values), references)


def decode_arguments(
    message: CallMessage, body: bytes | memoryview, references: Sequence[RemoteReference]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call. Raise ProtocolError if message and body do not fit together.

    ``references``: this worker's own, in the order of the message.
    """
    try:
        values = decode_values(body)
    except ShippingError as error:
        raise ProtocolError(f"the arguments of {message.function!r} cannot be read") from error
    by_place = {
        place: reference
        for (place, _), reference in zip(message.references, references, strict=True)
    }
    count = message.positions + len(message.names)
    is_sound = len(by_place) == len(message.references) and all(place < count for place in by_place)
    if not is_sound or len(values) != count - len(by_place) or len(set(message.names)) != len(message.names):
        raise ProtocolError(f"the arguments of {message.function!r} do not fit its names")
    remaining = iter(values)
    merged = [by_place[place] if place in by_place else next(remaining) for place in range(count)]
    return merged[: message.positions], dict(zip(message.names, merged[message.positions :], strict=True))


def encode_result(function: str, value: Any) -> list[Content]:
    """Encode the result of a function. Raise RunError if it cannot be sent."""
    return encode_values([(f"the result of {function}", value)])


def decode_result(body: bytes | memoryview) -> Any:
    """Return the value of a result; None if there is no body. Raise ProtocolError if it is malformed."""
    if not len(body):
        return None
    try:
        (value,) = decode_values(body)
    except (ShippingError, ValueError) as error:
        raise ProtocolError("the result of a remote call cannot be read") from error
    return value
