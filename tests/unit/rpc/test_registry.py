"""The registry knows functions by name, and nothing else can be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from barnraise.core.errors import RunError
from barnraise.rpc.registry import MAX_NAME, FunctionRegistry


def square(value: int) -> int:
    return value * value


def _made_in_cell(factor: int) -> Callable[[int], int]:
    def scale(value: int) -> int:
        return factor * value

    return scale


class _Table:
    def lookup(self, key: str) -> str:
        return key


def test_registered_function_is_found_by_name_and_by_itself() -> None:
    registry = FunctionRegistry()
    registry.add("math.square", square)
    assert registry.get("math.square") is square
    assert registry.name_of(square) == "math.square"
    assert registry.name_of("square") == "square", "a name may be known to the callee only"
    assert registry.get("square") is None
    assert registry.names == ("math.square",)


def test_bound_method_is_found_by_itself() -> None:
    registry, table = FunctionRegistry(), _Table()
    registry.add("lookup", table.lookup)
    assert registry.name_of(table.lookup) == "lookup"


def test_unregistered_function_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(RunError, match="square is not registered") as caught:
        FunctionRegistry().name_of(square)
    assert "@rpc.register" in caught.value.hint


def test_two_functions_of_one_name_are_refused() -> None:
    registry = FunctionRegistry()
    registry.add("square", square)
    registry.add("square", square)
    with pytest.raises(RunError, match="another function is registered as square"):
        registry.add("square", _made_in_cell(2))
    assert registry.get("square") is square


def test_methods_of_two_objects_do_not_replace_each_other() -> None:
    registry = FunctionRegistry()
    registry.add("lookup", _Table().lookup)
    with pytest.raises(RunError, match="another function"):
        registry.add("lookup", _Table().lookup)


def test_function_that_was_defined_again_replaces_its_earlier_version() -> None:
    registry = FunctionRegistry()
    registry.add("scale", _made_in_cell(2))
    registry.add("scale", _made_in_cell(3))
    function = registry.get("scale")
    assert function is not None
    assert function(5) == 15


@pytest.mark.parametrize("name", ["", "<lambda>", "a b", "é", "a" * (MAX_NAME + 1), "1st", "a\n"])
def test_impossible_name_is_refused(name: str) -> None:
    with pytest.raises(RunError, match="cannot be the name"):
        FunctionRegistry().add(name, square)


def test_value_that_is_no_function_is_refused() -> None:
    value: Any = 5
    with pytest.raises(RunError, match="it is an int, not a function"):
        FunctionRegistry().add("five", value)
