"""Prevents torch from unpickling data of a guest.

torch's object collectives, its RPC, one optimizer and one checkpoint transport unpickle data of other
ranks. That runs code of these ranks. Owners may do that to each other; a guest may not do it to any rank.
The link proves the machine of a rank: claims of ranks or of the store do not count.
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

from barnraise.agent_client.roles import ask_roles
from barnraise.agent_client.run_requests import RolesResponse
from barnraise.collectives.torch_patch.torch_rpc import refuse_rpc
from barnraise.core.config import load_settings
from barnraise.core.errors import UntrustedPickle
from barnraise.runs.participants import not_owners

_OBJECTS = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
_UNPICKLES = "_tensor_to_object"  # the function that all of these call
_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
_TRANSPORT = "torch.distributed.checkpoint._pg_transport"
_HINT = (
    "Send tensors instead (all_gather, or run.gather of a session), "
    "or name only owners' machines: barnraise run --on NAMES."
)

Function = Callable[..., Any]


def install_pickle_guard() -> None:
    """Guard torch's functions if the agent says that the cluster has a guest.

    Raise an error if the agent does not answer, or if this torch lacks one of the functions, so that no path
    stays open.
    """
    if isinstance(getattr(distributed_c10d, _UNPICKLES), _Guarded):
        return
    launched = bool(os.environ.get("BARNRAISE_LAUNCHED"))
    roles = ask_roles(load_settings(), os.environ.get("BARNRAISE_RUN", ""), launched=launched)
    if roles is None or not roles.guests:
        return
    for name in (*_OBJECTS, _UNPICKLES):
        guarded = _Guarded(roles, getattr(distributed_c10d, name))
        for module in (dist, distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, guarded)
    if roles.run_guests:
        _refuse_rpc(roles)
    partial = functools.partial
    finder = _PatchOnImport(
        {_ZERO: partial(_guard_zero, roles), _TRANSPORT: partial(_guard_transport, roles)}
    )
    for name, patch in finder.patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, finder)


def check_group(roles: RolesResponse, group: dist.ProcessGroup) -> None:
    """Raise UntrustedPickle unless every member is proved to be on an owner's machine.

    A group of another backend proves nothing. It is rejected in a run with a guest, and only there.
    """
    if group.size() == 1:
        return
    nodes: Sequence[bytes] | None = getattr(group, "nodes", None)
    if nodes is None:
        if not roles.run_guests:
            return
        guests = " and ".join(roles.run_guests)
        raise UntrustedPickle(
            f"{guests} is a guest in this run, and a {dist.get_backend(group)} group does not "
            "authenticate its ranks, so torch could unpickle data of the guest",
            hint=f"{_HINT} A group of owners only may do so with the backend `barnraise`.",
        )
    strangers = not_owners(roles, nodes)
    if strangers:
        raise UntrustedPickle(
            f"{' and '.join(strangers)} is a guest in this group, and torch would unpickle its data",
            hint=_HINT,
        )


class _Guarded:
    """Wrapper of a torch function that has an argument called ``group``."""

    def __init__(self, roles: RolesResponse, original: Function) -> None:
        functools.update_wrapper(self, original)
        self._roles = roles
        self._original = original
        self._signature = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:  # torch raises its own error
            return self._original(*args, **kwargs)
        group = bound.arguments.get("group") or dist.group.WORLD
        # Without a group, and outside of it, torch unpickles nothing.
        if isinstance(group, dist.ProcessGroup):
            check_group(self._roles, group)
        return self._original(*args, **kwargs)


def _refuse_rpc(roles: RolesResponse) -> None:
    """Disable RPC, which runs functions that other ranks name, over its own connections."""
    guests = " and ".join(roles.run_guests)
    refuse_rpc(
        lambda: UntrustedPickle(
            f"{guests} is a guest in this run, and torch's RPC runs any function that a rank names",
            hint=_HINT,
        )
    )


def _guard_zero(roles: RolesResponse, module: ModuleType) -> None:
    module._broadcast_object = _Guarded(roles, module._broadcast_object)  # type: ignore[attr-defined]


def _guard_transport(roles: RolesResponse, module: ModuleType) -> None:
    original = module.PGTransport.recv_checkpoint

    @functools.wraps(original)
    def receive(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_group(roles, self._pg)
        return original(self, *args, **kwargs)

    module.PGTransport.recv_checkpoint = receive


class _PatchOnImport(MetaPathFinder):
    """Import hook that patches rarely used modules, which take seconds to import."""

    def __init__(self, patches: dict[str, Callable[[ModuleType], None]]) -> None:
        self.patches = patches

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        patch = self.patches.get(name)
        spec = PathFinder.find_spec(name, path, target) if patch is not None else None
        if spec is not None and spec.loader is not None and patch is not None:
            spec.loader = _PatchingLoader(spec.loader, patch)
        return spec


class _PatchingLoader(Loader):
    def __init__(self, loader: Loader, patch: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)
