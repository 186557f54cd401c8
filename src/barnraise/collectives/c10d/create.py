"""Creates groups: rendezvous, connection of the ranks, and the shell that fits this torch."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store
from torch.distributed.constants import default_pg_timeout

from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.c10d.operations import OpenedGroup, seconds_of
from barnraise.collectives.c10d.process_group import BarnraiseProcessGroup
from barnraise.collectives.c10d.reconfigure import Reconfiguration
from barnraise.collectives.client import current_comm_process
from barnraise.collectives.messages import GroupMember, GroupOpened
from barnraise.collectives.rendezvous import encode_entry, exchange_members, read_entries
from barnraise.collectives.shm.arena import SharedArena
from barnraise.collectives.submit import Submitter
from barnraise.collectives.torch_patch.pickle_guard import install_pickle_guard
from barnraise.collectives.torch_patch.run_levels import levels_of_run
from barnraise.collectives.torch_patch.torch_version import has_python_backends, warn_if_untested
from barnraise.core.config import Settings, load_settings
from barnraise.core.errors import CollectiveError, OperationTimeout, PeerLost
from barnraise.core.flow.log_once import first_time
from barnraise.core.units import format_duration

log = logging.getLogger("barnraise.collectives")

_MIN_PAIR_S = 0.1
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


def open_pairs(
    rank: int, world: int, gather: Callable[[bytes], Sequence[bytes]], timeout_s: float
) -> dict[int, OpenedGroup]:
    """Open a group of two ranks with each other rank, so that a lost rank fails its own pairs only.

    Every rank calls this function. ``gather`` returns the messages of all ranks, by rank. All ranks open
    their pairs in one order, so that none waits for another one in a circle.
    """
    if world == 1:
        return {}
    opener = _GroupOpener(timeout_s)
    members, nonce = read_entries(gather(encode_entry(opener.member)))
    deadline = time.monotonic() + timeout_s
    pairs: dict[int, OpenedGroup] = {}
    for other in range(world):
        if other == rank:
            continue
        low, high = min(rank, other), max(rank, other)
        left_s = max(_MIN_PAIR_S, deadline - time.monotonic())
        try:
            pairs[other] = opener.connect(
                int(rank == high), (members[low], members[high]), f"{nonce}/{low}-{high}", left_s
            )
        except CollectiveError as error:
            close_pairs(pairs.values())
            raise _named_in_pair(error, other, timeout_s) from error
    return pairs


def close_pairs(pairs: Iterable[OpenedGroup]) -> None:
    """Close groups that `open_pairs` has opened."""
    for pair in pairs:
        pair.submitter.comm_process.close_group(pair.submitter.group)


def _named_in_pair(error: CollectiveError, other: int, timeout_s: float) -> CollectiveError:
    """Return the error of a pair with the other rank of the pair as all workers call it."""
    if isinstance(error, PeerLost):
        return PeerLost(other, error.why)
    if isinstance(error, OperationTimeout):
        return OperationTimeout(f"rank {other} did not connect within {timeout_s:g} s", late=(other,))
    return error


def prepare_groups() -> None:
    """Start the communication process, so that the first group connects sooner."""
    _current_arena()


def create_backend(
    store: Store, rank: int, world: int, timeout: timedelta, *, enable_reconfigure: bool = False
) -> BarnraiseProcessGroup:
    """Create what ``init_process_group`` expects of a backend in this torch.

    torch always hands over a timeout. Its default means that the script has given none.
    """
    given = None if timeout == default_pg_timeout else timeout
    if enable_reconfigure:
        return create_reconfigurable(given)
    opener = _GroupOpener(given)
    group = _process_group(opener.rendezvous(store, rank, world), opener.timeout_s)
    group.set_levels(levels_of_run())
    return group


def create_reconfigurable(timeout: timedelta | float | None = None) -> BarnraiseProcessGroup:
    """Create a group without members. Its ``reconfigure`` method connects it, any number of times."""
    opener = _GroupOpener(timeout)
    return BarnraiseProcessGroup(None, opener.timeout_s, Reconfiguration(opener.member, opener.connect))


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


def _process_group(opened: OpenedGroup, timeout_s: float) -> BarnraiseProcessGroup:
    if not has_python_backends(torch.__version__):
        return BarnraiseProcessGroup(opened, timeout_s)
    from barnraise.collectives.c10d.hooked import HookedProcessGroup, RegisteredProcessGroup

    kind = HookedProcessGroup if _dispatches() else RegisteredProcessGroup
    return kind(opened, timeout_s)


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
