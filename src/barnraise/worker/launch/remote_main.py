"""Entry point of a launched function on a worker: reads the arguments, calls, keeps rank 0's result."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from barnraise.core.errors import ShippingError
from barnraise.core.files import write_atomically
from barnraise.worker.launch.serializer import Content, decode_values, encode_values

SCRIPT = "barnraise_launch.py"
ARGUMENTS = "barnraise_launch.arguments"
RESULT = "barnraise_launch.result"


class RemoteCall(NamedTuple):
    """All that a function is given."""

    positional: list[Any]
    named: dict[str, Any]
    constants: dict[str, Any]


def encode_call(
    positional: Sequence[object], named: Mapping[str, object], constants: Sequence[tuple[str, object]]
) -> list[Content]:
    """Encode the file with the arguments. Raise RunError with the name of an argument that cannot be sent."""
    form = (len(positional), list(named), [name for name, _ in constants])
    return encode_values(
        [
            ("the call", form),
            *((f"argument {number}", value) for number, value in enumerate(positional, 1)),
            *((f"argument {name}", value) for name, value in named.items()),
            *((f"the global {name}", value) for name, value in constants),
        ]
    )


def main(function: Callable[..., object], *, beside: str) -> None:
    """Call the function, on every rank; the script in the run's folder calls this."""
    call = _call(Path(beside).with_name(ARGUMENTS))
    result = function(*call.positional, **call.named)
    if os.environ.get("RANK", "0") == "0":
        write_atomically(Path(beside).with_name(RESULT), encode_values([("the result", result)]))


def constant(name: str, *, beside: str) -> Any:
    """Return a global of the function, as it was where the function was launched."""
    return _call(Path(beside).with_name(ARGUMENTS)).constants[name]


@cache
def _call(file: Path) -> RemoteCall:
    form, *values = decode_values(file.read_bytes())
    try:
        count, names, constants = form
        at = count + len(names)
        return RemoteCall(
            values[:count],
            dict(zip(names, values[count:at], strict=True)),
            dict(zip(constants, values[at:], strict=True)),
        )
    except (TypeError, ValueError) as error:
        raise ShippingError(
            f"the arguments of the run cannot be read: {error}",
            hint="Run it again; if it repeats, install the same Barnraise on all machines.",
        ) from error
