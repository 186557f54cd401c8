"""Registry of the functions that other workers may call, by name. Pure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from barnraise.core.errors import RunError
from barnraise.worker.launch.serializer import a_kind

MAX_NAME = 200
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]*", re.ASCII)

Function = Callable[..., Any]


class FunctionRegistry:
    """Registered functions by name. A caller names a function, and only a name in here can be called."""

    def __init__(self) -> None:
        self._functions: dict[str, Function] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names in order."""
        return tuple(sorted(self._functions))

    def add(self, name: str, function: Function) -> None:
        """Register a function under a name. Raise RunError if another one has it.

        A function that was defined again, as in a cell of a notebook, replaces its earlier version.
        """
        check_name(name)
        if not callable(function):
            raise RunError(
                f"{name} cannot be registered: it is {a_kind(function)}, not a function",
                hint='Write rpc.register("NAME", function).',
            )
        known = self._functions.get(name)
        if known is not None and known != function and not _is_new_version(known, function):
            raise RunError(
                f"another function is registered as {name}",
                hint='Register one of them under another name: rpc.register("NAME", function).',
            )
        self._functions[name] = function

    def get(self, name: str) -> Function | None:
        """Return the function of a name, or None."""
        return self._functions.get(name)

    def name_of(self, function: str | Function) -> str:
        """Return the name under which to call a function; a text is a name already."""
        if isinstance(function, str):
            check_name(function)
            return function
        for name, known in self._functions.items():
            if known == function:
                return name
        raise RunError(
            f"{getattr(function, '__qualname__', repr(function))} is not registered for remote calls",
            hint="Write @rpc.register above it, in the script that all workers run.",
        )


def check_name(name: str) -> None:
    """Raise RunError unless a name can be the name of a function."""
    if len(name) > MAX_NAME or _NAME.fullmatch(name) is None:
        raise RunError(
            f"{name[:MAX_NAME]!r} cannot be the name of a function for remote calls",
            hint=f"Use at most {MAX_NAME} letters, digits and . _ : / -, and begin with a letter.",
        )


def _is_new_version(known: Function, function: Function) -> bool:
    if not (inspect.isfunction(known) and inspect.isfunction(function)):
        return False
    return (known.__module__, known.__qualname__) == (function.__module__, function.__qualname__)
