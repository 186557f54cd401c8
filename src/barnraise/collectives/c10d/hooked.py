"""Process groups for torch 2.15 and later, whose operations torch's hooks can see.

The flight recorder is such a hook. torch runs hooks in its own process group, which then calls a backend
object. The work that torch returns from there cannot be polled: its ``is_completed`` stays False. So each
method returns the work that the backend object has made on this thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from barnraise.collectives.c10d.operations import GroupOperations, OpenedGroup
from barnraise.collectives.c10d.process_group import BarnraiseProcessGroup
from barnraise.collectives.torch_patch.autoload import DEVICES
from barnraise.collectives.work import BarnraiseWork

_group = dist.ProcessGroup


def _kept(method: Callable[..., BarnraiseWork]) -> Callable[..., BarnraiseWork]:
    """Return a method of the backend object that keeps its work for the process group."""

    @wraps(method)
    def run(self: BarnraiseBackend, *arguments: Any, **options: Any) -> BarnraiseWork:
        self.last.work = work = method(self, *arguments, **options)
        return work

    return run


class BarnraiseBackend(GroupOperations, Backend):
    """Backend object: what torch's process group calls after its hooks."""

    def __init__(self, opened: OpenedGroup, timeout_s: float) -> None:
        Backend.__init__(self, opened.rank, opened.world)
        GroupOperations.__init__(self, opened, timeout_s)
        self._close_later = None  # the process group closes the group
        self.last = threading.local()

    allreduce = _kept(GroupOperations.allreduce)
    reduce = _kept(GroupOperations.reduce)
    reduce_scatter = _kept(GroupOperations.reduce_scatter)
    reduce_scatter_single = _kept(GroupOperations.reduce_scatter_single)
    broadcast = _kept(GroupOperations.broadcast)
    allgather = _kept(GroupOperations.allgather)
    all_gather_single = _kept(GroupOperations.all_gather_single)
    gather = _kept(GroupOperations.gather)
    scatter = _kept(GroupOperations.scatter)
    all_to_all_single = _kept(GroupOperations.all_to_all_single)
    alltoall = _kept(GroupOperations.alltoall)
    barrier = _kept(GroupOperations.barrier)
    send = _kept(GroupOperations.send)
    recv = _kept(GroupOperations.recv)
    recv_anysource = _kept(GroupOperations.recv_anysource)


class RegisteredProcessGroup(BarnraiseProcessGroup):
    """Process group with a backend object, which torch 2.15 needs to know its name.

    Its operations do not pass through torch. torch cannot pass on those of every accelerator.
    """

    def __init__(self, opened: OpenedGroup, timeout_s: float) -> None:
        super().__init__(opened, timeout_s)
        self._backend = BarnraiseBackend(opened, timeout_s)
        kind = _group.BackendType.CUSTOM
        self._set_default_backend(kind)
        for device in DEVICES:
            self._register_backend(torch.device(device), kind, self._backend)


class HookedProcessGroup(RegisteredProcessGroup):
    """Process group whose operations pass through torch's own group, with its hooks, to the backend object.

    Each method calls torch's method of the same name. pybind11 knows by the name of the calling function that
    torch's own method is meant, so every method is written out. Coalesced operations go directly.
    """

    def allreduce(self, *arguments: Any, **options: Any) -> BarnraiseWork:
        _group.allreduce(self, *arguments, **options)
        return self._made()

    def reduce(self, *arguments: Any, **options: Any) -> BarnraiseWork:
        _group.reduce(self, *arguments, **options)
        return self._made()

    def reduce_scatter(self, *arguments: Any, **options: Any) -> BarnraiseWork:
        _group.reduce_scatter(self, *arguments, **options)
        return self._made()

    def reduce_scatter_single(self, *arguments: Any, **options: Any) -> BarnraiseWork:
        _group.reduce_scatter_single(self, *arguments, **options)
        return self._made()

    def broadcast(self, *arguments: Any, **options: Any) -> BarnraiseWork:
        _group.broadcast(self, *arguments, **options)
        return self._made()

    def allgather(self, *arguments: Any, **options: Any) -> BarnraiseWork:
        _group.allgather(self, *arguments, **options)
        return self._made()

    def all_gather_single(self, *arguments: Any, **options: Any) -> BarnraiseWork:
        _group.all_gather_single(self, *arguments, **options)
        return self._made()

    def gather(self, *arguments: Any, **options: Any) -> BarnraiseWork:
        _group.gather(self, *arguments, **options)
        return self._made()

    def scatter(self, *arguments: Any, **options: Any) -> BarnraiseWork:
        _group.scatter(self, *arguments, **options)
        return self._made()

    def all_to_all_single(self, *arguments: Any, **options: Any) -> BarnraiseWork:
        _group.all_to_all_single(self, *arguments, **options)
        return self._made()

    def alltoall(self, *arguments: Any, **options: Any) -> BarnraiseWork:
        _group.alltoall(self, *arguments, **options)
        return self._made()

    def barrier(self, *arguments: Any, **options: Any) -> BarnraiseWork:
        _group.barrier(self, *arguments, **options)
        return self._made()

    def send(self, *arguments: Any, **options: Any) -> BarnraiseWork:
        _group.send(self, *arguments, **options)
        return self._made()

    def recv(self, *arguments: Any, **options: Any) -> BarnraiseWork:
        _group.recv(self, *arguments, **options)
        return self._made()

    def recv_anysource(self, *arguments: Any, **options: Any) -> BarnraiseWork:
        _group.recv_anysource(self, *arguments, **options)
        return self._made()

    _reduce_scatter_base = reduce_scatter_single
    _allgather_base = all_gather_single
    # torch's method looks for this older name, too, and would find this class again. Its own leads to ours.
    alltoall_base = _group.alltoall_base

    def begin_coalescing(self) -> None:
        super().begin_coalescing()
        self._backend.begin_coalescing()

    def join_coalesced(self) -> BarnraiseWork:
        """Return one work for all calls since `begin_coalescing`, those of the backend object included."""
        assert self._coalescing is not None
        self._coalescing.append(self._backend.join_coalesced())
        return super().join_coalesced()

    def _made(self) -> BarnraiseWork:
        work: BarnraiseWork = self._backend.last.work
        del self._backend.last.work
        return work
