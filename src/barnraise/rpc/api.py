"""Functions of ``barnraise.rpc``: one registry and one endpoint for each process."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, overload

from barnraise.core.errors import OperationTimeout, RunError, TorchMissing
from barnraise.rpc.endpoint import RpcEndpoint
from barnraise.rpc.messages import MAX_TIMEOUT_S
from barnraise.rpc.references import DEFAULT_TIMEOUT_S, RemoteReference
from barnraise.rpc.registry import Function, FunctionRegistry

if TYPE_CHECKING:
    from barnraise.training.session import Session

_F = TypeVar("_F", bound=Function)
_START_S = 120.0
_THREADS = 16
_registry = FunctionRegistry()
_endpoint: RpcEndpoint | None = None
_last_statistics: dict[str, int] = {}
_lock = threading.Lock()


@overload
def register(name: _F) -> _F: ...
@overload
def register(name: str) -> Callable[[_F], _F]: ...
@overload
def register(name: str, function: _F) -> _F: ...
def register(name: Any, function: Any = None) -> Any:
    """Register a function that other workers may call, under its own or the given name.

    Use it as ``@rpc.register``, ``@rpc.register("name")`` or ``rpc.register("name", function)``, on all
    workers, before `start`.
    """
    if not isinstance(name, str):
        _registry.add(getattr(name, "__name__", repr(name)), name)
        return name
    if function is None:
        return lambda decorated: register(name, decorated)
    _registry.add(name, function)
    return function


def start(session: Session | None = None, *, threads: int = _THREADS, timeout_s: float = _START_S) -> None:
    """Connect all workers of the group, and answer calls from now on. All workers call it.

    ``session``: of `barnraise.init`, after ``prepare``; None for the default group of torch.distributed.
    ``threads``: calls that this worker computes at once; further ones wait.
    """
    global _endpoint
    with _lock:
        if _endpoint is not None:
            raise RunError("remote calls are started already", hint="Call rpc.stop() first.")
        if threads < 1:
            raise RunError(f"rpc.start cannot use {threads} threads", hint="Use 1 or more.")
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise RunError(
                f"rpc.start cannot wait {timeout_s} s",
                hint=f"Use more than 0 and at most {MAX_TIMEOUT_S:g} seconds.",
            )
        try:
            from barnraise.rpc.connect import connect
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise TorchMissing("barnraise.rpc needs torch, which is not installed") from error
        endpoint, channels = connect(_registry, session, threads, timeout_s)
        _endpoint = endpoint  # first: a function that another worker calls may make calls itself
        endpoint.start(channels)
        for channel in channels.values():
            channel.start()
        atexit.unregister(_close_at_exit)
        atexit.register(_close_at_exit)  # after the handlers of what it uses, so that it runs before them


def stop(timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Wait until all workers have called it, answer calls until then, and end remote calls.

    References that this worker still holds are released. Raise OperationTimeout, with the late ranks, if some
    did not call it in time; remote calls are over on this worker all the same. Without `start` it does
    nothing.
    """
    global _endpoint, _last_statistics
    with _lock:
        endpoint = _endpoint
        if endpoint is None:
            return
        try:
            late = endpoint.stop(timeout_s)
        finally:
            endpoint.close(0.0)
            _last_statistics = endpoint.statistics()
            _endpoint = None
    if late:
        ranks = ", ".join(f"rank {rank}" for rank in late)
        raise OperationTimeout(
            f"{ranks} did not call rpc.stop within {timeout_s:g} s",
            late=late,
            hint="Call rpc.stop() on all workers, or give it a longer timeout_s.",
        )


def call_async(
    to: int, function: str | Function, /, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S, **kwargs: Any
) -> Future[Any]:
    """Call a registered function on a rank. Return the future of its result.

    Arguments and results are plain data, arrays and tensors, which arrive on the CPU, or references. The
    future fails with RpcError if the function fails, with OperationTimeout after ``timeout_s``, and with
    PeerLost if the rank is lost.
    """
    return _running().call(to, _registry.name_of(function), args, kwargs, timeout_s)


def call(
    to: int, function: str | Function, /, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S, **kwargs: Any
) -> Any:
    """Call a registered function on a rank, and return its result."""
    return call_async(to, function, *args, timeout_s=timeout_s, **kwargs).result()


def remote_async(
    to: int, function: str | Function, /, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S, **kwargs: Any
) -> Future[RemoteReference]:
    """Call a registered function on a rank, where the result stays. Return the future of a reference."""
    return _running().call(to, _registry.name_of(function), args, kwargs, timeout_s, keeps=True)


def remote(
    to: int, function: str | Function, /, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S, **kwargs: Any
) -> RemoteReference:
    """Call a registered function on a rank, where the result stays. Return a reference to it."""
    return remote_async(to, function, *args, timeout_s=timeout_s, **kwargs).result()


def reference(value: Any) -> RemoteReference:
    """Return a reference to an object of this worker, which can be sent to others."""
    return _running().reference(value)


def statistics() -> dict[str, int]:
    """Return the counters of this worker, also after `stop`.

    ``calls``: made by this worker. ``served``, ``failed``, ``expired``: calls of others, by how they ended.
    ``pending``: calls without a result. ``objects``: objects here that references keep alive. ``leases``:
    references that other ranks hold to them. ``references``: held by this worker. ``leaked``: references that
    it held at `stop`.
    """
    endpoint = _endpoint
    return dict(_last_statistics) if endpoint is None else endpoint.statistics()


def _running() -> RpcEndpoint:
    endpoint = _endpoint
    if endpoint is None:
        raise RunError("remote calls are not started", hint="Call rpc.start() on all workers first.")
    return endpoint


def _close_at_exit() -> None:
    """Close the endpoint before the interpreter ends: its threads use torch."""
    if _endpoint is not None:
        _endpoint.close(0.0)


def _forget_in_child() -> None:
    global _endpoint, _lock
    _endpoint, _lock = None, threading.Lock()  # a fork copies no threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
