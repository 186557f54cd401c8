"""The c10d backend: torch's calls in, works out."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import GroupName

from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.client import current_mover
from barnraise.collectives.messages import GroupOpened
from barnraise.collectives.ops import movement, operation, reduction
from barnraise.collectives.ops.tensors import blocks_of, only, rows_of
from barnraise.collectives.rendezvous import exchange_members
from barnraise.collectives.shm.arena import SharedArena
from barnraise.collectives.submit import Submitter
from barnraise.collectives.torch_patch.torch_version import warn_if_untested
from barnraise.collectives.work import BarnraiseWork, together
from barnraise.core.config import Settings, load_settings
from barnraise.core.errors import UnsupportedOperation
from barnraise.core.flow.log_once import first_time
from barnraise.core.units import format_duration
from barnraise.planning.inputs.levels import Levels

log = logging.getLogger("barnraise.collectives")

_arena: SharedArena | None = None
_arena_lock = threading.Lock()


def create_group(
    store: Store,
    rank: int,
    world: int,
    timeout: timedelta | float | None = None,
    generation: int | None = None,
) -> BarnraiseProcessGroup:
    """Form a group of ``world`` ranks that all call this with the same store, used for this group alone."""
    warn_if_untested(torch.__version__)
    arena = _current_arena()
    mover = arena.mover
    settings = load_settings()  # anew for each group, so that two groups may use two strategies
    seconds = _seconds(timeout, settings.collectives.timeout_s)
    members, fresh = exchange_members(store, rank, world, mover.member, seconds)
    opened = mover.open_group(
        fresh,
        rank,
        members,
        seconds,
        _given_table(settings),
        mover.generation if generation is None else generation,
    )
    _announce(opened, rank, world, mover.encryption)
    issuer = Submitter(mover, arena, opened.group, world, opened.table, settings.collectives)
    return BarnraiseProcessGroup(rank, world, seconds, issuer, opened.links, opened.nodes)


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None
) -> None:
    """A barrier on the default or the given group; raises OperationTimeout that names the missing ranks."""
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, BarnraiseProcessGroup):
        raise UnsupportedOperation(
            "this monitored barrier needs a group of the barnraise backend",
            hint="Call init_process_group('barnraise') first; Gloo's is torch.distributed.monitored_barrier.",
        )
    chosen.monitored_barrier(timeout)


def _current_arena() -> SharedArena:
    global _arena
    with _arena_lock:
        mover = current_mover()
        if _arena is None or _arena.mover is not mover:
            _arena = SharedArena(mover)
        return _arena


def _forget_arena() -> None:
    global _arena, _arena_lock
    _arena, _arena_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_arena)


def _given_table(settings: Settings) -> CostTable | None:
    latency, bandwidth = settings.collectives.cost_latency_us, settings.collectives.cost_bandwidth_mbps
    if latency is None or bandwidth is None:
        return None
    return CostTable.measured(latency / 1e6, 8 / (bandwidth * 1e6))


def _announce(opened: GroupOpened, rank: int, world: int, encryption: str) -> None:
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
        log.warning("links are in PLAINTEXT, as network.encryption says: only for a fabric you trust")


def _seconds(timeout: timedelta | float | None, default: float) -> float:
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return default if value is None or value <= 0 else float(value)


# torch's stubs give most operations a second, tensor-wise form besides the one that torch calls: hence the
# ignored overrides. Options come as one of a dozen C++ types, or None.
class BarnraiseProcessGroup(dist.ProcessGroup):
    """One group. All methods may be called from any thread; calls on one group must agree between ranks."""

    def __init__(
        self,
        rank: int,
        world: int,
        timeout_s: float,
        issuer: Submitter,
        links: Sequence[str],
        nodes: Sequence[bytes] = (),
    ) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]  # the stub lacks this form
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s
        self._issuer = issuer
        self._name = ""
        self._description = ""
        self._coalescing: list[BarnraiseWork] | None = None
        self._forget: Callable[[int], None] | None = issuer.mover.forget_group
        self.links = tuple(links)
        self.nodes = tuple(nodes)  # the machines of the other ranks, as their links proved

    def tell_sites(self, sites: Sequence[Sequence[int]], *, are_places: bool = True) -> None:
        """The ranks of each site along its chain, the leader first; every rank says the same.

        Rings follow this order. One site with everybody in it says nothing but that. ``are_places``: not just
        the workers of each machine; only then what is fixed by level is about them.
        """
        self._issuer.sites = tuple(tuple(site) for site in sites)
        self._issuer.are_places = are_places

    def tell_levels(self, levels: Levels) -> None:
        """Which strategies a person has fixed; every rank says the same."""
        self._issuer.levels = levels

    @property
    def sites(self) -> tuple[tuple[int, ...], ...]:
        """As they were told; none where a strategy is set by name that does not know of them."""
        sites = self._issuer.sites
        return sites if self._issuer.may_use_sites and len(sites) > 1 else ()

    # what torch asks of every group

    def getBackendName(self) -> str:
        return "barnraise"

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._world

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        """What DCP asks before it saves beside the training; devices are staged through the CPU."""
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> BarnraiseProcessGroup:  # type: ignore[override]  # it is its own
        return self

    @property
    def group_name(self) -> GroupName:
        return GroupName(self._name)

    @property
    def group_desc(self) -> str:
        return self._description

    def supports_splitting(self) -> bool:
        return False

    def setTimeout(self, timeout: timedelta) -> None:
        self._timeout_s = _seconds(timeout, self._timeout_s)

    def abort(self) -> None:
        """End every pending operation here and on every member, at once."""
        self._issuer.abort("abort() was called")

    def shutdown(self) -> None:
        """Leave the group; safe to call twice, and in a forked child, where it does nothing."""
        self._forget = None
        self._issuer.mover.close_group(self._issuer.group)

    def __del__(self) -> None:
        forget = getattr(self, "_forget", None)
        if forget is not None:
            forget(self._issuer.group)

    # reductions

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> BarnraiseWork:  # type: ignore[override]
        return self._run(reduction.all_reduce(only(tensors), _op(opts), self._world), opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> BarnraiseWork:
        if not tensors:
            return together([], tensors)
        return self._run(reduction.all_reduce_coalesced(tensors, _op(opts), self._world), opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> BarnraiseWork:  # type: ignore[override]
        call = reduction.reduce(only(tensors), _op(opts), opts.rootRank, self._rank, self._world)
        return self._run(call, opts)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> BarnraiseWork:
        call = reduction.reduce_scatter(only(outputs), inputs[0], _op(opts), self._rank, self._world)
        return self._run(call, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> BarnraiseWork:
        blocks = blocks_of(input, output, self._world)
        return self._run(reduction.reduce_scatter(output, blocks, _op(opts), self._rank, self._world), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> BarnraiseWork:
        pairs = zip(outputs, inputs, strict=True)
        return together([self.reduce_scatter_single(one, whole, opts) for one, whole in pairs], outputs)

    # gathering and spreading

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> BarnraiseWork:  # type: ignore[override]
        return self._run(movement.broadcast(only(tensors), opts.rootRank, self._rank), opts)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> BarnraiseWork:
        row = outputs[0]
        return self._run(movement.all_gather(row, only(inputs), list(row), self._rank, self._world), opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> BarnraiseWork:
        return self._run(movement.all_gather_single(output, input, self._rank, self._world), opts)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> BarnraiseWork:
        works = [
            self.allgather([[row[number] for row in outputs]], [tensor], opts)
            for number, tensor in enumerate(inputs)
        ]
        return together(works, [tensor for row in outputs for tensor in row])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> BarnraiseWork:
        pairs = zip(outputs, inputs, strict=True)
        return together([self.all_gather_single(whole, one, opts) for whole, one in pairs], outputs)

    def gather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> BarnraiseWork:
        root, row = opts.rootRank, outputs[0] if opts.rootRank == self._rank else []
        return self._run(movement.gather(row, only(inputs), root, self._rank, self._world), opts)

    def scatter(  # type: ignore[override]
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> BarnraiseWork:
        root, row = opts.rootRank, inputs[0] if opts.rootRank == self._rank else []
        return self._run(movement.scatter(only(outputs), row, root, self._rank, self._world), opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> BarnraiseWork:
        outputs = rows_of(output, output_splits, self._world)
        inputs = rows_of(input, input_splits, self._world)
        return self._run(movement.all_to_all(outputs, inputs, [output], self._rank, self._world), opts)

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> BarnraiseWork:
        call = movement.all_to_all(outputs, inputs, list(outputs), self._rank, self._world)
        return self._run(call, opts)

    # what torch before 2.13 called some of them, and parts of it still do

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    # barriers

    def barrier(self, opts: Any = None) -> BarnraiseWork:
        return self._run(operation.barrier(), opts)

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = True
    ) -> None:
        """A barrier that names who is missing; it always names them all."""
        self._issuer.collective(operation.barrier(), _seconds(timeout, self._timeout_s), waits=True).wait()

    # point to point

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> BarnraiseWork:
        return self._noted(
            self._issuer.point_to_point(operation.send(only(tensors)), peer, tag, self._timeout_s)
        )

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> BarnraiseWork:
        return self._noted(
            self._issuer.point_to_point(operation.receive(only(tensors)), peer, tag, self._timeout_s)
        )

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> BarnraiseWork:
        return self.recv(tensors, -1, tag)

    # torch's coalescing manager: all that is called in between is waited for as one

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> BarnraiseWork:
        works, self._coalescing = self._coalescing or [], None
        return together(works, [tensor for work in works for tensor in work.result()])

    def _run(self, call: operation.Operation, opts: Any) -> BarnraiseWork:
        seconds = _seconds(getattr(opts, "timeout", None), self._timeout_s)
        waits = self._coalescing is None and getattr(opts, "asyncOp", True) is False
        return self._noted(self._issuer.collective(call, seconds, waits=waits))

    def _noted(self, work: BarnraiseWork) -> BarnraiseWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work


def _op(opts: Any) -> dist.ReduceOp:
    """Of options, or the operation itself, which torch's own layers may give in their place."""
    if opts is None:
        return dist.ReduceOp(dist.ReduceOp.SUM)
    op: dist.ReduceOp = getattr(opts, "reduceOp", opts)
    return op
