"""Functions that workers execute on request in the tests of remote calls."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch

from barnraise import rpc
from tests.failure.bodies import outcome

_PATIENCE_S = 60.0
_references: dict[str, rpc.RemoteReference] = {}


@rpc.register
def square(value: Any) -> Any:
    return value * value


@rpc.register
def relay(path: list[int], value: int) -> list[int]:
    """Call the next rank of a path, and return the processes that were passed."""
    later = rpc.call(path[0], relay, path[1:], value) if path else []
    return [os.getpid(), *later]


@rpc.register
def wait_for_file(path: str) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while not Path(path).exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@rpc.register
def touch_and_wait(begun: str, path: str) -> bool:
    Path(begun).touch()
    return wait_for_file(path)


@rpc.register
def make_table(size: int) -> dict[str, torch.Tensor]:
    return {str(number): torch.full((size,), float(number)) for number in range(3)}


@rpc.register
def lookup(table: rpc.RemoteReference, key: str) -> torch.Tensor:
    value: torch.Tensor = table.fetch()[key]
    return value


@rpc.register
def keep_reference(name: str, reference: rpc.RemoteReference) -> None:
    _references[name] = reference


def rpc_start(threads: int = 16) -> None:
    rpc.start(threads=threads)


def rpc_stop(timeout_s: float = _PATIENCE_S) -> dict[str, int]:
    _references.clear()
    rpc.stop(timeout_s)
    return rpc.statistics()


def rpc_statistics() -> dict[str, int]:
    return rpc.statistics()


def rpc_call(to: int, name: str, args: list[Any], timeout_s: float = _PATIENCE_S) -> Any:
    return rpc.call(to, name, *args, timeout_s=timeout_s)


def rpc_call_outcome(to: int, name: str, args: list[Any], timeout_s: float = _PATIENCE_S) -> dict[str, Any]:
    """Call a function, and return how the call ended and after how many seconds."""
    started = time.monotonic()
    end = outcome(lambda: rpc.call(to, name, *args, timeout_s=timeout_s))
    return end | {"seconds": time.monotonic() - started}


def rpc_squares(to: int, sizes: list[int]) -> list[bool]:
    """Send tensors of these sizes at once; tell which came back as their squares."""
    tensors = [torch.arange(size, dtype=torch.float64) for size in sizes]
    futures = [rpc.call_async(to, square, tensor) for tensor in tensors]
    pairs = zip(tensors, futures, strict=True)
    return [torch.equal(future.result(), tensor * tensor) for tensor, future in pairs]


def rpc_make(to: int, name: str, size: int) -> int:
    """Make a table on a rank, and keep the reference to it under a name."""
    _references[name] = rpc.remote(to, make_table, size)
    return _references[name].owner


def rpc_hand_on(to: int, name: str, new_name: str) -> None:
    rpc.call(to, keep_reference, new_name, _references[name])


def rpc_release(name: str) -> None:
    _references.pop(name).release()


def rpc_lookup(to: int, name: str, key: str) -> list[float]:
    """Look a key up on a rank, in the table of a reference."""
    values: list[float] = rpc.call(to, lookup, _references[name], key).tolist()
    return values


def rpc_fetch_outcome(name: str) -> dict[str, Any]:
    return outcome(lambda: _references[name].fetch())


def rpc_load(to: list[int], seconds: float) -> int:
    """Call the ranks for some seconds from several threads, and return the number of right results."""
    right: list[int] = []

    def work(rank: int) -> None:
        deadline, number = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            number += 1
            right.append(rpc.call(rank, square, number) == number * number)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in to for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(right)
    return len(right)


def rpc_stop_holding() -> dict[str, int]:
    """Stop while this worker holds references."""
    rpc.stop(_PATIENCE_S)
    _references.clear()
    return rpc.statistics()
