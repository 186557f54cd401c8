"""Creates groups: rendezvous, connection of the ranks, and the shell that fits this torch."""

from __future__ import annotations

import logging
import os
import threading
from contextvars import ContextVar
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.c10d.operations import OpenedGroup, seconds_of
from barnraise.collectives.c10d.process_group import BarnraiseProcessGroup
from barnraise.collectives.c10d.reconfigure import Reconfiguration
from barnraise.collectives.client import current_comm_process
from barnraise.collectives.messages import GroupMember, GroupOpened
from barnraise.collectives.rendezvous import exchange_members
from barnraise.collectives.shm.arena import SharedArena
from barnraise.collectives.submit import Submitter
from barnraise.collectives.torch_patch.pickle_guard import install_pickle_guard
from barnraise.collectives.torch_patch.torch_version import has_python_backends, warn_if_untested
from barnraise.core.config import Settings, load_settings
from barnraise.core.errors import UnsupportedOperation
from barnraise.core.flow.log_once import first_time
from barnraise.core.units import format_duration

log = logging.getLogger("barnraise.collectives")

# The arena of a rank that is one thread of several, as in `barnraise.testing`.
arena_of_thread: ContextVar[SharedArena | None] = ContextVar("arena_of_thread", default=None)

_arena: SharedArena | None = None
_arena_lock = threading.Lock()


def create_group(
    store: Store,
    rank: int,
    world: int,
    timeout: timedelta | float | None = None,
    generation: int | None = None,
) -> BarnraiseProcessGroup:
    """Create a group of ``world`` ranks.

    Every rank calls this function with the same store. The store is used for this group alone.
    """
    opener = _GroupOpener(timeout, generation)
    return BarnraiseProcessGroup(opener.rendezvous(store, rank, world), opener.timeout_s)


def prepare_groups() -> None:
    """Start the communication process, so that the first group connects sooner."""
    _current_arena()


def create_backend(
    store: Store, rank: int, world: int, timeout: timedelta, *, enable_reconfigure: bool = False
) -> BarnraiseProcessGroup:
    """Create what ``init_process_group`` expects of a backend in this torch."""
    if enable_reconfigure:
        return create_reconfigurable(timeout)
    opener = _GroupOpener(timeout)
    opened = opener.rendezvous(store, rank, world)
    if not has_python_backends(torch.__version__):
        return BarnraiseProcessGroup(opened, opener.timeout_s)
    from barnraise.collectives.c10d.hooked import HookedProcessGroup, RegisteredProcessGroup

    kind = HookedProcessGroup if _dispatches() else RegisteredProcessGroup
    return kind(opened, opener.timeout_s)


def create_reconfigurable(timeout: timedelta | float | None = None) -> BarnraiseProcessGroup:
    """Create a group without members. Its ``reconfigure`` method connects it, any number of times."""
    opener = _GroupOpener(timeout)
    return BarnraiseProcessGroup(None, opener.timeout_s, Reconfiguration(opener.member, opener.connect))


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None
) -> None:
    """Run a barrier on the default or the given group.

    Raise OperationTimeout that names the missing ranks.
    """
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, BarnraiseProcessGroup):
        raise UnsupportedOperation(
            "this monitored barrier needs a group of the barnraise backend",
            hint="Call init_process_group('barnraise') first; Gloo's is torch.distributed.monitored_barrier.",
        )
    chosen.monitored_barrier(timeout)


class _GroupOpener:
    """Opens groups of this process, with the settings of now: two groups may use different algorithms."""

    def __init__(self, timeout: timedelta | float | None, generation: int | None = None) -> None:
        warn_if_untested(torch.__version__)
        self._arena = _current_arena()
        self._comm_process = self._arena.comm_process
        self._settings = load_settings()
        self._generation = self._comm_process.generation if generation is None else generation
        wanted_s = seconds_of(timeout, self._settings.collectives.timeout_s)
        self.timeout_s = min(wanted_s, self._comm_process.max_wait_s)

    @property
    def member(self) -> GroupMember:
        return self._comm_process.member

    def rendezvous(self, store: Store, rank: int, world: int) -> OpenedGroup:
        """Open a group with the ranks that meet in the store."""
        members, nonce = exchange_members(store, rank, world, self.member, self.timeout_s)
        return self.connect(rank, members, nonce, self.timeout_s)

    def connect(
        self, rank: int, members: tuple[GroupMember, ...], name: str, timeout_s: float
    ) -> OpenedGroup:
        """Open a group of these members."""
        opened = self._comm_process.open_group(
            name, rank, members, timeout_s, _configured_table(self._settings), self._generation
        )
        world = len(members)
        _log_opened(opened, rank, world, self._comm_process.encryption)
        submitter = Submitter(
            self._comm_process, self._arena, opened.group, world, opened.table, self._settings.collectives
        )
        return OpenedGroup(rank, world, submitter, opened.links, opened.nodes)


def _dispatches() -> bool:
    """Return True if torch can route operations of this machine's accelerator to a backend object.

    torch's own process group does so by device, and has no route for MPS.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    key = {None: "CPU", "cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}.get(
        accelerator.type if accelerator is not None else None, "PrivateUse1"
    )
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", key))


def _current_arena() -> SharedArena:
    global _arena
    own = arena_of_thread.get()
    if own is not None:
        return own
    with _arena_lock:
        comm_process = current_comm_process()
        if _arena is None or _arena.comm_process is not comm_process:
            install_pickle_guard()
            _arena = SharedArena(comm_process)
        return _arena


def _forget_arena() -> None:
    global _arena, _arena_lock
    _arena, _arena_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_arena)


def _configured_table(settings: Settings) -> CostTable | None:
    latency, bandwidth = settings.collectives.cost_latency_us, settings.collectives.cost_bandwidth_mbps
    if latency is None or bandwidth is None:
        return None
    return CostTable.measured(latency / 1e6, 8 / (bandwidth * 1e6))


def _log_opened(opened: GroupOpened, rank: int, world: int, encryption: str) -> None:
    table = opened.table
    rate = f"{8e-6 / table.seconds_per_byte:.0f} Mbit/s" if table.seconds_per_byte > 0 else "no limit"
    log.info(
        "rank %d of %d: latency %s, bandwidth %s; links: %s",
        rank,
        world,
        format_duration(table.latency_s),
        rate,
        ", ".join(opened.links) or "none",
    )
    if encryption == "plaintext" and first_time("plaintext"):
        log.warning("links are in PLAINTEXT (network.encryption): use this only in a network you trust")
