"""Operations of a group: translates torch's calls into operations of ours and returns their works.

The class knows no base class of torch. A shell for each interface of torch inherits it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from barnraise.collectives.ops import movement, operation, reduction
from barnraise.collectives.ops.tensors import only, split_blocks, split_rows
from barnraise.collectives.per_call import current_options
from barnraise.collectives.submit import Submitter
from barnraise.collectives.work import BarnraiseWork, join_works
from barnraise.core.errors import CollectiveError
from barnraise.planning.inputs.levels import Levels


class OpenedGroup(NamedTuple):
    """A group whose ranks are connected. ``nodes``: machines of the other ranks, proved by their links."""

    rank: int
    world: int
    submitter: Submitter
    links: Sequence[str] = ()
    nodes: Sequence[bytes] = ()


def seconds_of(timeout: timedelta | float | None, default: float) -> float:
    """Return a timeout of torch in seconds, or the default if there is none."""
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return default if value is None or value <= 0 else float(value)


# Options are one of a dozen C++ types of torch, or None.
class GroupOperations:
    """All operations of a group, under the names that torch calls.

    All methods may be called from any thread. Calls on one group must agree between ranks.
    """

    def __init__(self, opened: OpenedGroup | None, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._coalescing: list[BarnraiseWork] | None = None
        self._connected: Submitter | None = None
        self._close_later: Callable[[int], None] | None = None
        self._is_aborted = False
        self._rank = self._world = -1
        self.links: tuple[str, ...] = ()
        self.nodes: tuple[bytes, ...] = ()
        if opened is not None:
            self._connect(opened)

    def _connect(self, opened: OpenedGroup) -> None:
        """Use a newly opened group from now on, and close the previous one."""
        previous, self._connected, self._is_aborted = self._connected, opened.submitter, False
        self._rank, self._world = opened.rank, opened.world
        self._close_later = opened.submitter.comm_process.close_group_later
        self.links, self.nodes = tuple(opened.links), tuple(opened.nodes)
        if previous is not None:
            previous.comm_process.close_group(previous.group)

    @property
    def submitter(self) -> Submitter:
        """Return the submitter of the opened group."""
        if self._connected is None:
            raise CollectiveError(
                "this group has no members yet", hint="Call its reconfigure method with their handles first."
            )
        return self._connected

    def set_sites(self, sites: Sequence[Sequence[int]], *, are_places: bool = True) -> None:
        """Set the ranks of each site along its chain, the leader first. Every rank sets the same sites.

        Rings follow this order. A single site with every rank in it sets only the order of the ring.
        ``are_places``: True if the sites are places, False if they are only the workers of each machine.
        Settings by network level apply to places only.
        """
        self.submitter.sites = tuple(tuple(site) for site in sites)
        self.submitter.are_places = are_places

    def set_levels(self, levels: Levels) -> None:
        """Set the algorithms that the user fixed by network level. Every rank sets the same levels."""
        self.submitter.levels = levels

    @property
    def sites(self) -> tuple[tuple[int, ...], ...]:
        """Return the sites that were set, or none if the configured algorithm does not use sites."""
        sites = self.submitter.sites
        return sites if self.submitter.may_use_sites and len(sites) > 1 else ()

    # methods that torch calls on every group

    def getBackendName(self) -> str:
        return "barnraise"

    def abort(self) -> None:
        """Fail every pending operation at once, on this rank and on every member."""
        self._is_aborted = True
        if self._connected is not None:
            self._connected.abort("abort() was called")

    def shutdown(self) -> None:
        """Leave the process group. Calling it twice is safe, and in a forked child it does nothing."""
        self._close_later = None
        if self._connected is not None:
            self._connected.comm_process.close_group(self._connected.group)

    def __del__(self) -> None:
        close_later = getattr(self, "_close_later", None)
        if close_later is not None:
            close_later(self.submitter.group)

    # reductions

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> BarnraiseWork:
        return self._run(reduction.all_reduce(only(tensors), _reduce_op(opts), self._world), opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> BarnraiseWork:
        if not tensors:
            return join_works([], tensors)
        return self._run(reduction.all_reduce_coalesced(tensors, _reduce_op(opts), self._world), opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> BarnraiseWork:
        call = reduction.reduce(only(tensors), _reduce_op(opts), opts.rootRank, self._rank, self._world)
        return self._run(call, opts)

    def reduce_scatter(
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

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> BarnraiseWork:
        return self._run(movement.broadcast(only(tensors), opts.rootRank, self._rank), opts)

    def allgather(
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

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> BarnraiseWork:
        root, row = opts.rootRank, outputs[0] if opts.rootRank == self._rank else []
        return self._run(movement.gather(row, only(inputs), root, self._rank, self._world), opts)

    def scatter(
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

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    # barriers

    def barrier(self, opts: Any = None) -> BarnraiseWork:
        return self._run(operation.barrier(), opts)

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = True
    ) -> None:
        """Run a barrier that names every missing rank when it times out."""
        seconds = self._seconds_of_call(timeout)
        self.submitter.submit_collective(operation.barrier(), seconds, waits=True).wait()

    # point to point

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> BarnraiseWork:
        return self._record(
            self.submitter.submit_point_to_point(
                operation.send(only(tensors)), peer, tag, self._seconds_of_call(None)
            )
        )

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> BarnraiseWork:
        return self._record(
            self.submitter.submit_point_to_point(
                operation.receive(only(tensors)),
                peer,
                tag,
                self._seconds_of_call(None),
                fails_alone=current_options().timeout_s is not None,
            )
        )

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> BarnraiseWork:
        return self.recv(tensors, -1, tag)

    # torch's coalescing manager: one work for all calls in between

    def begin_coalescing(self) -> None:
        self._coalescing = []

    def join_coalesced(self) -> BarnraiseWork:
        """Return one work for all calls since `begin_coalescing`."""
        works, self._coalescing = self._coalescing or [], None
        return join_works(works, [tensor for work in works for tensor in work.result()])

    def _run(self, call: operation.Operation, opts: Any) -> BarnraiseWork:
        seconds = self._seconds_of_call(getattr(opts, "timeout", None))
        waits = self._coalescing is None and getattr(opts, "asyncOp", True) is False
        return self._record(self.submitter.submit_collective(call, seconds, waits=waits))

    def _seconds_of_call(self, timeout: timedelta | float | None) -> float:
        """Return the timeout of a call: its own, or that of its block, or that of the group."""
        own_s = current_options().timeout_s
        return seconds_of(timeout, self._timeout_s if own_s is None else own_s)

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
