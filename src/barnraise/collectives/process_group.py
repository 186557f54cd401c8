"""The c10d process group: translates torch's calls into operations and returns their works."""

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
from barnraise.collectives.client import current_comm_process
from barnraise.collectives.messages import GroupOpened
from barnraise.collectives.ops import movement, operation, reduction
from barnraise.collectives.ops.tensors import only, split_blocks, split_rows
from barnraise.collectives.rendezvous import exchange_members
from barnraise.collectives.shm.arena import SharedArena
from barnraise.collectives.submit import Submitter
from barnraise.collectives.torch_patch.pickle_guard import install_pickle_guard
from barnraise.collectives.torch_patch.torch_version import warn_if_untested
from barnraise.collectives.work import BarnraiseWork, join_works
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
    """Create a group of ``world`` ranks.

    Every rank calls this function with the same store. The store is used for this group alone.
    """
    warn_if_untested(torch.__version__)
    arena = _current_arena()
    comm_process = arena.comm_process
    settings = load_settings()  # per group, so that two groups may use different algorithms
    seconds = _seconds(timeout, settings.collectives.timeout_s)
    members, fresh = exchange_members(store, rank, world, comm_process.member, seconds)
    opened = comm_process.open_group(
        fresh,
        rank,
        members,
        seconds,
        _configured_table(settings),
        comm_process.generation if generation is None else generation,
    )
    _log_opened(opened, rank, world, comm_process.encryption)
    submitter = Submitter(comm_process, arena, opened.group, world, opened.table, settings.collectives)
    return BarnraiseProcessGroup(rank, world, seconds, submitter, opened.links, opened.nodes)


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


def _current_arena() -> SharedArena:
    global _arena
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


def _seconds(timeout: timedelta | float | None, default: float) -> float:
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return default if value is None or value <= 0 else float(value)


# torch's stubs give most operations a second form besides the one that torch calls: hence the ignored
# overrides. Options are one of a dozen C++ types, or None.
class BarnraiseProcessGroup(dist.ProcessGroup):
    """Process group of the ``barnraise`` backend.

    All methods may be called from any thread. Calls on one group must agree between ranks.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        timeout_s: float,
        submitter: Submitter,
        links: Sequence[str],
        nodes: Sequence[bytes] = (),
    ) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]  # the stub lacks this form
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s
        self._submitter = submitter
        self._name = ""
        self._description = ""
        self._coalescing: list[BarnraiseWork] | None = None
        self._close_later: Callable[[int], None] | None = submitter.comm_process.close_group_later
        self.links = tuple(links)
        self.nodes = tuple(nodes)  # machines of the other ranks, proved by their links

    def set_sites(self, sites: Sequence[Sequence[int]], *, are_places: bool = True) -> None:
        """Set the ranks of each site along its chain, the leader first. Every rank sets the same sites.

        Rings follow this order. A single site with every rank in it sets only the order of the ring.
        ``are_places``: True if the sites are places, False if they are only the workers of each machine.
        Settings by network level apply to places only.
        """
        self._submitter.sites = tuple(tuple(site) for site in sites)
        self._submitter.are_places = are_places

    def set_levels(self, levels: Levels) -> None:
        """Set the algorithms that the user fixed by network level. Every rank sets the same levels."""
        self._submitter.levels = levels

    @property
    def sites(self) -> tuple[tuple[int, ...], ...]:
        """Return the sites that were set, or none if the configured algorithm does not use sites."""
        sites = self._submitter.sites
        return sites if self._submitter.may_use_sites and len(sites) > 1 else ()

    # methods that torch calls on every group

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
        """Return the device types that DCP asks for before an asynchronous save.

        Tensors of other devices are staged through the CPU.
        """
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
        """Fail every pending operation at once, on this rank and on every member."""
        self._submitter.abort("abort() was called")

    def shutdown(self) -> None:
        """Leave the process group. Calling it twice is safe, and in a forked child it does nothing."""
        self._close_later = None
        self._submitter.comm_process.close_group(self._submitter.group)

    def __del__(self) -> None:
        close_later = getattr(self, "_close_later", None)
        if close_later is not None:
            close_later(self._submitter.group)

    # reductions

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> BarnraiseWork:  # type: ignore[override]
        return self._run(reduction.all_reduce(only(tensors), _reduce_op(opts), self._world), opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> BarnraiseWork:
        if not tensors:
            return join_works([], tensors)
        return self._run(reduction.all_reduce_coalesced(tensors, _reduce_op(opts), self._world), opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> BarnraiseWork:  # type: ignore[override]
        call = reduction.reduce(only(tensors), _reduce_op(opts), opts.rootRank, self._rank, self._world)
        return self._run(call, opts)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> BarnraiseWork:
        call = reduction.reduce_scatter(only(outputs), inputs[0], _reduce_op(opts), self._rank, self._world)
        return self._run(call, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> BarnraiseWork:
        blocks = split_blocks(input, output, self._world)
        return self._run(
            reduction.reduce_scatter(output, blocks, _reduce_op(opts), self._rank, self._world), opts
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> BarnraiseWork:
        pairs = zip(outputs, inputs, strict=True)
        return join_works(
            [self.reduce_scatter_single(output, whole, opts) for output, whole in pairs], outputs
        )

    # data movement

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
        return join_works(works, [tensor for row in outputs for tensor in row])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> BarnraiseWork:
        pairs = zip(outputs, inputs, strict=True)
        return join_works([self.all_gather_single(whole, block, opts) for whole, block in pairs], outputs)

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
        outputs = split_rows(output, output_splits, self._world)
        inputs = split_rows(input, input_splits, self._world)
        return self._run(movement.all_to_all(outputs, inputs, [output], self._rank, self._world), opts)

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> BarnraiseWork:
        call = movement.all_to_all(outputs, inputs, list(outputs), self._rank, self._world)
        return self._run(call, opts)

    # names before torch 2.13, which parts of torch still use

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
        """Run a barrier that names every missing rank when it times out."""
        self._submitter.submit_collective(
            operation.barrier(), _seconds(timeout, self._timeout_s), waits=True
        ).wait()

    # point to point

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> BarnraiseWork:
        return self._record(
            self._submitter.submit_point_to_point(operation.send(only(tensors)), peer, tag, self._timeout_s)
        )

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> BarnraiseWork:
        return self._record(
            self._submitter.submit_point_to_point(
                operation.receive(only(tensors)), peer, tag, self._timeout_s
            )
        )

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> BarnraiseWork:
        return self.recv(tensors, -1, tag)

    # torch's coalescing manager: one work for all calls in between

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> BarnraiseWork:
        works, self._coalescing = self._coalescing or [], None
        return join_works(works, [tensor for work in works for tensor in work.result()])

    def _run(self, call: operation.Operation, opts: Any) -> BarnraiseWork:
        seconds = _seconds(getattr(opts, "timeout", None), self._timeout_s)
        waits = self._coalescing is None and getattr(opts, "asyncOp", True) is False
        return self._record(self._submitter.submit_collective(call, seconds, waits=waits))

    def _record(self, work: BarnraiseWork) -> BarnraiseWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work


def _reduce_op(opts: Any) -> dist.ReduceOp:
    """Return the reduce operation of the options.

    torch's own layers may pass the operation itself in place of options.
    """
    if opts is None:
        return dist.ReduceOp(dist.ReduceOp.SUM)
    op: dist.ReduceOp = getattr(opts, "reduceOp", opts)
    return op
