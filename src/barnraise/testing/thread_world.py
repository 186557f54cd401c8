"""torch's record of process groups, one for each rank that is a thread of this process.

torch keeps the record in one object and documents that it may be replaced. While ranks run, the object in its
place passes on to the record of the calling rank. Threads that are no rank see the record of the process.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from barnraise.core.errors import CollectiveError, UnsupportedOperation

_HINT = "Use a torch from 2.13 to 2.15, or test with processes: torchrun --nproc-per-node 4."
_SHARDING = "torch.distributed.tensor._sharding_prop"
_numbers = itertools.count(1)
_running = threading.Lock()


@dataclass(eq=False)
class RankWorld:
    """Record of one rank's process groups, with the attributes of torch's own record."""

    default_pg: dist.ProcessGroup | None = None
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, Any] = field(default_factory=dict)
    pg_group_ranks: dict[Any, Any] = field(default_factory=dict)
    pg_backend_config: dict[Any, Any] = field(default_factory=dict)
    pg_to_tag: dict[Any, Any] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, Any] = field(default_factory=dict)
    pg_default_device: dict[Any, Any] = field(default_factory=dict)
    tags_to_pg: dict[Any, Any] = field(default_factory=dict)
    group_count: int = 0
    comms: list[Any] = field(default_factory=list)
    number: int = field(default_factory=lambda: next(_numbers))  # never used again in this process

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        """Return what torch's own record says of its groups."""
        describe: Callable[[RankWorld], list[dict[str, Any]]] = vars(distributed_c10d._World)[
            "pg_config_info"
        ].fget
        return describe(self)


_own_world: ContextVar[RankWorld | None] = ContextVar("own_world", default=None)


class _WorldOfCaller:
    """Object in place of torch's record, which passes on to the record of the calling rank."""

    def __init__(self, process_world: object) -> None:
        vars(self)["process_world"] = process_world

    def __getattr__(self, name: str) -> Any:
        return getattr(_own_world.get() or self.process_world, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_own_world.get() or self.process_world, name, value)


@contextmanager
def separate_worlds() -> Iterator[None]:
    """Let threads have a record of process groups each, and restore torch afterwards.

    Raise UnsupportedOperation if this torch or this process cannot do that, CollectiveError if a simulation
    runs already.
    """
    isolate = _check_torch()
    if not _running.acquire(blocking=False):
        raise CollectiveError(
            "a simulation runs already in this process", hint="Call spawn again when it has returned."
        )
    with ExitStack() as stack:
        stack.callback(_running.release)
        world = distributed_c10d._world
        _replace(stack, distributed_c10d, "_world", _WorldOfCaller(world))
        _replace(stack, DeviceMesh, "__init__", _mesh_of_rank(DeviceMesh.__init__))
        # Each init_process_group changes these three. Threads must not leave their changes behind.
        _replace(stack, sys, "excepthook", sys.excepthook)
        for name in ("_backend", "_default_pg_init_method"):
            _replace(stack, distributed_c10d, name, getattr(distributed_c10d, name, None))
        sharding = sys.modules.get(_SHARDING)
        if sharding is not None:  # torch asks threads for this lock
            _replace(stack, sharding.ShardingPropagator, "_fake_mode_lock", threading.Lock())
        stack.callback(isolate, False)
        isolate(True)
        yield


@contextmanager
def own_world() -> Iterator[None]:
    """Give the calling thread a record of process groups of its own."""
    token = _own_world.set(RankWorld())
    try:
        yield
    finally:
        _own_world.reset(token)


def _check_torch() -> Callable[[bool], object]:
    """Return the function that separates named groups by thread. Raise UnsupportedOperation without it."""
    if os.environ.get("BARNRAISE_LAUNCHED"):
        raise UnsupportedOperation(
            "this process is a worker of a run, which has groups of its own",
            hint="Start the test without `barnraise run`.",
        )
    isolate: Callable[[bool], object] | None = getattr(
        torch._C._distributed_c10d, "_set_thread_isolation_mode", None
    )
    record = getattr(distributed_c10d, "_World", None)
    if isolate is None or record is None or not hasattr(distributed_c10d, "_world"):
        raise UnsupportedOperation(f"torch {torch.__version__} has no process groups of threads", hint=_HINT)
    unknown = unknown_attributes(record)
    if unknown:
        raise UnsupportedOperation(
            f"torch {torch.__version__} keeps more about process groups than a simulation has for each rank: "
            f"{', '.join(unknown)}",
            hint=_HINT,
        )
    return isolate


def unknown_attributes(record: type) -> list[str]:
    """Return the properties of torch's record that the record of a rank lacks."""
    names = [name for name, value in vars(record).items() if isinstance(value, property)]
    world = RankWorld()
    return sorted(name for name in names if not hasattr(type(world), name) and name not in vars(world))


def _replace(stack: ExitStack, owner: Any, name: str, value: object) -> None:
    """Replace an attribute until the stack ends."""
    if not hasattr(owner, name):
        return
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _mesh_of_rank(original: Callable[..., None]) -> Callable[..., None]:
    """Return an initializer of device meshes that keeps equal meshes of two ranks apart.

    torch remembers by mesh what depends on the rank. It has a field for threads, which it fills only for a
    backend of its own tests.
    """

    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        world = _own_world.get()
        if world is None:
            return
        if not hasattr(self, "_thread_id"):
            raise UnsupportedOperation(
                f"torch {torch.__version__} cannot keep device meshes of several threads apart", hint=_HINT
            )
        self._thread_id, self._hash = world.number, None

    return initialize
