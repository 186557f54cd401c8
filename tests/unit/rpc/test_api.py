"""The functions of ``barnraise.rpc`` before a start, and their decorators."""

from __future__ import annotations

import subprocess
import sys

import pytest

from barnraise import rpc
from barnraise.core.errors import RunError
from barnraise.rpc import api
from barnraise.rpc.registry import FunctionRegistry


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> FunctionRegistry:
    """A registry that is empty again after each test."""
    monkeypatch.setattr(api, "_registry", FunctionRegistry())
    return api._registry


def test_register_is_a_decorator_with_and_without_a_name(registry: FunctionRegistry) -> None:
    @rpc.register
    def one() -> int:
        return 1

    @rpc.register("numbers.two")
    def two() -> int:
        return 2

    def three() -> int:
        return 3

    assert rpc.register("three", three) is three
    assert (one(), two()) == (1, 2)
    assert registry.names == ("numbers.two", "one", "three")


def test_calls_before_start_say_what_to_do() -> None:
    for call in (
        lambda: rpc.call(0, "f"),
        lambda: rpc.call_async(0, "f"),
        lambda: rpc.remote(0, "f"),
        lambda: rpc.remote_async(0, "f"),
        lambda: rpc.reference(1),
    ):
        with pytest.raises(RunError, match="are not started") as caught:
            call()
        assert "rpc.start()" in caught.value.hint


def test_stop_without_start_does_nothing() -> None:
    rpc.stop()
    assert rpc.statistics().get("calls", 0) >= 0


def test_start_with_no_threads_is_refused() -> None:
    with pytest.raises(RunError, match="cannot use 0 threads"):
        rpc.start(threads=0)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_start_with_an_impossible_timeout_is_refused(timeout_s: float) -> None:
    with pytest.raises(RunError, match="cannot wait"):
        rpc.start(timeout_s=timeout_s)


def test_package_is_imported_without_torch() -> None:
    program = "from barnraise import rpc; import sys; rpc.register(print); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0


def test_package_is_an_attribute_of_the_root() -> None:
    program = "import barnraise; assert barnraise.rpc.call"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0
