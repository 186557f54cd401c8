"""Refuses what torch would unpickle from a guest.

torch's object collectives, its RPC and two of its optimizers' and checkpoints' ways unpickle what other ranks
send, which is to run code of theirs. Owners may do that to each other; a guest may do it to nobody. Whose
machine a rank is on, its link has proved: what ranks or the store say of themselves counts for nothing.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from barnraise.core.errors import UntrustedPickle
from barnraise.runs.participants import Participants

_OBJECTS = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
_UNPICKLES = "_tensor_to_object"  # what all of these end in
_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
_TRANSPORT = "torch.distributed.checkpoint._pg_transport"
_HINT = (
    "Send tensors instead (all_gather, or run.gather of a session), "
    "or name only owners' machines: barnraise run --on NAMES."
)

Function = Callable[..., Any]


def refuse_from_guests() -> None:
    """In a run with a guest, also in processes that its workers start. Raises where this torch has no such
    function, so that nothing is left open."""
    company = Participants.read(os.environ)
    if company is None or isinstance(getattr(distributed_c10d, _UNPICKLES), _Guarded):
        return
    for name in (*_OBJECTS, _UNPICKLES):
        guarded = _Guarded(company, getattr(distributed_c10d, name))
        for module in (dist, distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, guarded)
    _refuse_rpc(company)
    partial = functools.partial
    later = _Later({_ZERO: partial(_guard_zero, company), _TRANSPORT: partial(_guard_transport, company)})
    for name, change in later.changes.items():
        if name in sys.modules:
            change(sys.modules[name])
    sys.meta_path.insert(0, later)


def check_group(company: Participants, group: dist.ProcessGroup) -> None:
    """UntrustedPickle, unless every member is proved to be on an owner's machine."""
    if group.size() == 1:
        return
    nodes: Sequence[bytes] | None = getattr(group, "nodes", None)
    if nodes is None:
        guests = " and ".join(company.guests.values())
        raise UntrustedPickle(
            f"{guests} takes part in this run as a guest, and a group of {dist.get_backend(group)} does not "
            "prove who its members are, so that torch could unpickle what the guest sends",
            hint=f"{_HINT} A group that only owners are in may do so on the engine `barnraise`.",
        )
    strange = company.not_owners(nodes)
    if strange:
        raise UntrustedPickle(
            f"{' and '.join(strange)} takes part in this group as a guest, "
            "and torch would unpickle what its worker sends",
            hint=_HINT,
        )


class _Guarded:
    """A function of torch that has an argument called ``group``."""

    def __init__(self, company: Participants, original: Function) -> None:
        functools.update_wrapper(self, original)
        self._company = company
        self._original = original
        self._signature = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:  # torch says it in its own words
            return self._original(*args, **kwargs)
        group = bound.arguments.get("group") or dist.group.WORLD
        # Without a group, and for who is not in it, torch unpickles nothing.
        if isinstance(group, dist.ProcessGroup):
            check_group(self._company, group)
        return self._original(*args, **kwargs)


def _refuse_rpc(company: Participants) -> None:
    """It calls what others name, over connections of its own."""
    from torch.distributed import rpc

    if not rpc.is_available():
        return

    def refuse(*_: Any, **__: Any) -> None:
        guests = " and ".join(company.guests.values())
        raise UntrustedPickle(
            f"{guests} takes part in this run as a guest, and torch's RPC runs whatever a rank sends",
            hint=_HINT,
        )

    _ = rpc._init_rpc_backend  # what its init_rpc calls
    rpc._init_rpc_backend = refuse


def _guard_zero(company: Participants, module: ModuleType) -> None:
    module._broadcast_object = _Guarded(company, module._broadcast_object)  # type: ignore[attr-defined]


def _guard_transport(company: Participants, module: ModuleType) -> None:
    original = module.PGTransport.recv_checkpoint

    @functools.wraps(original)
    def receive(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_group(company, self._pg)
        return original(self, *args, **kwargs)

    module.PGTransport.recv_checkpoint = receive


class _Later(MetaPathFinder):
    """For modules that few programs import and that take seconds to."""

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self.changes = changes

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        change = self.changes.get(name)
        spec = PathFinder.find_spec(name, path, target) if change is not None else None
        if spec is not None and spec.loader is not None and change is not None:
            spec.loader = _Changing(spec.loader, change)
        return spec


class _Changing(Loader):
    def __init__(self, loader: Loader, change: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)
