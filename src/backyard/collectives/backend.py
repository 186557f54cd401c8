"""The c10d backend: torch's calls in, works out. Every tensor form is brought to flat pieces of bytes here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from backyard.collectives.client import current_mover
from backyard.collectives.costs import CostTable
from backyard.collectives.dtypes import ElementType, by_name
from backyard.collectives.issue import Issuer
from backyard.collectives.messages import AbortGroup, CloseGroup, ReceiveFrom, SendTo
from backyard.collectives.pieces import Piece, as_bytes, dense, ranges
from backyard.collectives.reductions import Reduction, reduction_of
from backyard.collectives.rendezvous import exchange_members
from backyard.collectives.staging import Arena
from backyard.collectives.work import BackyardWork
from backyard.core import metrics
from backyard.core.config import Settings
from backyard.core.errors import OperationMismatch, UnsupportedOperation

_BYTE = by_name("uint8")
_arena: Arena | None = None
_arena_lock = threading.Lock()


def _current_arena() -> Arena:
    global _arena
    with _arena_lock:
        mover = current_mover()
        if _arena is None or _arena.mover is not mover:
            _arena = Arena(mover)
        return _arena


def create_group(
    store: dist.Store,
    rank: int,
    world: int,
    timeout: timedelta | float | None = None,
    generation: int | None = None,
) -> BackyardGroup:
    """Form a group of ``world`` ranks that all call this with the same store."""
    arena = _current_arena()
    mover = arena.mover
    seconds = _seconds(timeout, mover.settings.collectives.timeout_s)
    members, fresh = exchange_members(store, rank, world, mover.member, seconds)
    opened = mover.open_group(
        fresh,
        rank,
        members,
        seconds,
        _given_table(mover.settings),
        mover.generation if generation is None else generation,
    )
    issuer = Issuer(mover, arena, opened.group, world, opened.table)
    metrics.groups_open.inc()
    return BackyardGroup(rank, world, seconds, issuer, opened.links)


def _given_table(settings: Settings) -> CostTable | None:
    latency, bandwidth = settings.collectives.cost_latency_us, settings.collectives.cost_bandwidth_mbps
    if latency is None or bandwidth is None:
        return None
    return CostTable.measured(latency / 1e6, 8 / (bandwidth * 1e6))


def _seconds(timeout: timedelta | float | None, default: float) -> float:
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return default if value is None or value <= 0 else float(value)


def _element(tensor: torch.Tensor) -> ElementType:
    if tensor.is_sparse or tensor.layout is not torch.strided:
        raise UnsupportedOperation(
            f"a tensor of layout {tensor.layout} cannot be moved", hint="Call to_dense() first."
        )
    return by_name(str(tensor.dtype).removeprefix("torch."))


class BackyardGroup(dist.ProcessGroup):
    """One group. All methods may be called from any thread; calls on one group must agree between ranks."""

    def __init__(self, rank: int, world: int, timeout_s: float, issuer: Issuer, links: Sequence[str]) -> None:
        super().__init__(rank, world)
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s
        self._issuer = issuer
        self._name = ""
        self._description = ""
        self._closed = False
        self.links = tuple(links)

    # what torch asks of every group

    def getBackendName(self) -> str:
        return "backyard"

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
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def supports_splitting(self) -> bool:
        return False

    def setTimeout(self, timeout: timedelta) -> None:
        self._timeout_s = _seconds(timeout, self._timeout_s)

    def abort(self) -> None:
        """End every pending operation here and on every member, at once."""
        self._issuer.mover.send(AbortGroup(self._issuer.group, "abort() was called"))

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            metrics.groups_open.dec()
            self._issuer.mover.send(CloseGroup(self._issuer.group))

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.shutdown()

    # reductions

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> BackyardWork:
        tensor = _only(tensors)
        return self._reduce_whole("all_reduce", tensor, opts, root=-1, keep=True)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> BackyardWork:
        """One operation for all tensors of one dtype, as they lie one behind the other."""
        element = _element(tensors[0])
        if any(_element(tensor) != element for tensor in tensors):
            raise UnsupportedOperation(
                "coalesced tensors must have one dtype", hint="Coalesce tensors of each dtype apart."
            )
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])

        def finish() -> None:
            start = 0
            for tensor in tensors:
                tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
                start += tensor.numel()

        return self._reduce_whole("all_reduce", flat, opts, root=-1, keep=True, result=tensors, finish=finish)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> BackyardWork:
        return self._reduce_whole(
            "reduce", _only(tensors), opts, root=opts.rootRank, keep=opts.rootRank == self._rank
        )

    def _reduce_whole(
        self,
        kind: str,
        tensor: torch.Tensor,
        opts: Any,
        *,
        root: int,
        keep: bool,
        result: list[torch.Tensor] | None = None,
        finish: Any = None,
    ) -> BackyardWork:
        element = _element(tensor)
        self._issuer.arena.check_device(tensor)
        reduction = reduction_of(_op(opts), element, self._world)
        values, copied = dense(tensor)
        flat = values.view(-1)
        pieces = [
            _reduce_piece(flat[lo // element.size : hi // element.size], reduction, keep=keep)
            for lo, hi in ranges(flat.numel() * element.size, element.size)
        ]
        if copied and keep:
            finish = _then(finish, lambda: tensor.copy_(values))
        return self._issuer.collective(
            kind,
            element,
            pieces,
            result or [tensor],
            self._timeout(opts),
            reduction=reduction.name,
            root=root,
            finish=finish,
        )

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> BackyardWork:
        return self._reduce_scatter(_only(outputs), inputs[0], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> BackyardWork:
        return self._reduce_scatter(output, self._blocks(input, output), opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> BackyardWork:
        works = [
            self._reduce_scatter(output, self._blocks(input, output), opts)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return _together(works, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], opts: Any
    ) -> BackyardWork:
        element = _element(output)
        self._issuer.arena.check_device(output)
        reduction = reduction_of(_op(opts), element, self._world)
        self._check_blocks(inputs, element)
        if inputs[self._rank].numel() != output.numel():
            raise OperationMismatch(
                f"reduce_scatter: the output has {output.numel()} elements, "
                f"this rank's input block {inputs[self._rank].numel()}"
            )
        flats = [block.reshape(-1) for block in inputs]
        values, copied = dense(output)
        target = values.view(-1)
        pieces = [
            _scatter_piece(cuts, self._rank, element, reduction, target)
            for cuts in _cut_blocks(flats, element.size)
        ]
        finish = (lambda: output.copy_(values)) if copied else None
        return self._issuer.collective(
            "reduce_scatter",
            element,
            pieces,
            [output],
            self._timeout(opts),
            reduction=reduction.name,
            finish=finish,
        )

    # gathering and spreading

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> BackyardWork:
        tensor = _only(tensors)
        element = _element(tensor)
        self._issuer.arena.check_device(tensor)
        values, copied = dense(tensor)
        flat = as_bytes(values)
        mine = opts.rootRank == self._rank
        pieces = [
            Piece(
                (hi - lo,),
                hi - lo,
                (lambda view, lo=lo, hi=hi: view.copy_(flat[lo:hi])) if mine else _nothing,
                _nothing if mine else (lambda view, lo=lo, hi=hi: flat[lo:hi].copy_(view)),
            )
            for lo, hi in ranges(flat.numel(), element.size)
        ]
        finish = (lambda: tensor.copy_(values)) if copied and not mine else None
        return self._issuer.collective(
            "broadcast", element, pieces, [tensor], self._timeout(opts), root=opts.rootRank, finish=finish
        )

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> BackyardWork:
        return self._all_gather(outputs[0], _only(inputs), opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> BackyardWork:
        return self._all_gather(self._blocks(output, input), input, opts, whole=output)

    _allgather_base = all_gather_single

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> BackyardWork:
        works = [
            self._all_gather([row[i] for row in outputs], tensor, opts) for i, tensor in enumerate(inputs)
        ]
        return _together(works, [tensor for row in outputs for tensor in row])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> BackyardWork:
        works = [
            self.all_gather_single(output, input, opts) for output, input in zip(outputs, inputs, strict=True)
        ]
        return _together(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        opts: Any,
        whole: torch.Tensor | None = None,
    ) -> BackyardWork:
        element = _element(tensor)
        self._issuer.arena.check_device(tensor)
        self._check_blocks(outputs, element)
        if outputs[self._rank].numel() != tensor.numel():
            raise OperationMismatch(
                f"all_gather: this rank gives {tensor.numel()} elements, "
                f"its place in the output has {outputs[self._rank].numel()}"
            )
        mine = as_bytes(tensor.contiguous())
        dense_outputs = [dense(output) for output in outputs]
        flats = [as_bytes(values) for values, _ in dense_outputs]
        pieces = []
        for cuts in _cut_blocks(flats, element.size):
            sizes = tuple(hi - lo for _, lo, hi in cuts)
            pieces.append(_gather_piece(cuts, sizes, self._rank, mine))
        finish = _write_back(dense_outputs, outputs)
        result = [whole] if whole is not None else list(outputs)
        return self._issuer.collective(
            "all_gather", element, pieces, result, self._timeout(opts), finish=finish
        )

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> BackyardWork:
        tensor = _only(inputs)
        element = _element(tensor)
        self._issuer.arena.check_device(tensor)
        mine = as_bytes(tensor.contiguous())
        block = mine.numel()
        if opts.rootRank != self._rank:
            piece = Piece(
                (block,) * self._world,
                block,
                lambda view: view.copy_(mine),  # type: ignore[arg-type, return-value]
                _nothing,
            )
            return self._issuer.collective(
                "gather", element, [piece], [], self._timeout(opts), root=opts.rootRank
            )
        self._check_blocks(outputs[0], element, equal=tensor.numel())
        dense_outputs = [dense(output) for output in outputs[0]]
        flats = [as_bytes(values) for values, _ in dense_outputs]
        cuts = [(flat, 0, block) for flat in flats]
        piece = _gather_piece(cuts, (block,) * self._world, self._rank, mine)
        return self._issuer.collective(
            "gather",
            element,
            [piece],
            list(outputs[0]),
            self._timeout(opts),
            root=opts.rootRank,
            finish=_write_back(dense_outputs, outputs[0]),
        )

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> BackyardWork:
        output = _only(outputs)
        element = _element(output)
        self._issuer.arena.check_device(output)
        values, copied = dense(output)
        target = as_bytes(values)
        block = target.numel()
        finish = (lambda: output.copy_(values)) if copied else None
        root = opts.rootRank
        if root == self._rank:
            self._check_blocks(inputs[0], element, equal=output.numel())
            flats = [as_bytes(tensor.contiguous()) for tensor in inputs[0]]

            def fill(view: torch.Tensor) -> None:
                for rank, flat in enumerate(flats):
                    view[rank * block : (rank + 1) * block].copy_(flat)

            start = root * block
            piece = Piece(
                (block,) * self._world,
                block * self._world,
                fill,
                lambda view: target.copy_(view[start : start + block]),  # type: ignore[arg-type, return-value]
            )
        else:
            piece = Piece(
                (block,) * self._world,
                block,
                _nothing,
                lambda view: target.copy_(view),  # type: ignore[arg-type, return-value]
            )
        return self._issuer.collective(
            "scatter", element, [piece], [output], self._timeout(opts), root=root, finish=finish
        )

    # everyone to everyone

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> BackyardWork:
        rows_in = input_splits or self._even(input)
        rows_out = output_splits or self._even(output)
        inputs = list(input.split(rows_in)) if input.dim() else [input]
        outputs = list(output.split(rows_out)) if output.dim() else [output]
        return self._all_to_all(outputs, inputs, opts, [output])

    alltoall_base = all_to_all_single

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> BackyardWork:
        return self._all_to_all(outputs, inputs, opts, list(outputs))

    def _all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any,
        result: list[torch.Tensor],
    ) -> BackyardWork:
        element = _element(inputs[0])
        self._issuer.arena.check_device(inputs[0])
        self._check_blocks(inputs, element)
        self._check_blocks(outputs, element)
        sources = [as_bytes(tensor.contiguous()) for tensor in inputs]
        dense_outputs = [dense(output) for output in outputs]
        targets = [as_bytes(values) for values, _ in dense_outputs]
        send = tuple(flat.numel() for flat in sources)
        receive = tuple(flat.numel() for flat in targets)
        if send[self._rank] != receive[self._rank]:
            raise OperationMismatch(
                f"all_to_all: this rank keeps {send[self._rank]} bytes, but expects {receive[self._rank]} of itself"
            )
        base = sum(send)

        def fill(view: torch.Tensor) -> None:
            start = 0
            for flat in sources:
                view[start : start + flat.numel()].copy_(flat)
                start += flat.numel()

        def drain(view: torch.Tensor) -> None:
            start = base
            for rank, flat in enumerate(targets):
                if rank == self._rank:
                    flat.copy_(sources[rank])
                else:
                    flat.copy_(view[start : start + flat.numel()])
                start += flat.numel()

        piece = Piece((), base + sum(receive), fill, drain)
        return self._issuer.collective(
            "all_to_all",
            element,
            [piece],
            result,
            self._timeout(opts),
            splits=(send, receive),
            finish=_write_back(dense_outputs, outputs),
        )

    def barrier(self, opts: Any = None) -> BackyardWork:
        return self._barrier(self._timeout(opts))

    def monitored_barrier(self, timeout: timedelta | None = None) -> None:
        """A barrier that names who is missing."""
        self._barrier(_seconds(timeout, self._timeout_s)).wait()

    def _barrier(self, timeout_s: float) -> BackyardWork:
        return self._issuer.collective("barrier", _BYTE, [Piece((), 0, _nothing, _nothing)], [], timeout_s)

    # point to point

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> BackyardWork:
        tensor = _only(tensors)
        self._issuer.arena.check_device(tensor)
        flat = as_bytes(tensor.contiguous())
        piece = Piece((), flat.numel(), lambda view: view.copy_(flat), _nothing)  # type: ignore[arg-type, return-value]
        return self._issuer.point_to_point(
            SendTo, peer, tag, _element(tensor), piece, [tensor], self._timeout_s
        )

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> BackyardWork:
        tensor = _only(tensors)
        self._issuer.arena.check_device(tensor)
        values, copied = dense(tensor)
        flat = as_bytes(values)
        piece = Piece((), flat.numel(), _nothing, lambda view: flat.copy_(view))  # type: ignore[arg-type, return-value]
        finish = (lambda: tensor.copy_(values)) if copied else None
        return self._issuer.point_to_point(
            ReceiveFrom, peer, tag, _element(tensor), piece, [tensor], self._timeout_s, finish
        )

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> BackyardWork:
        return self.recv(tensors, -1, tag)

    # small things

    def _timeout(self, opts: Any) -> float:
        return _seconds(getattr(opts, "timeout", None), self._timeout_s)

    def _even(self, tensor: torch.Tensor) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 1
        if rows % self._world:
            raise OperationMismatch(
                f"{rows} rows cannot be split evenly over {self._world} ranks", hint="Give split sizes."
            )
        return [rows // self._world] * self._world

    def _blocks(self, whole: torch.Tensor, one: torch.Tensor) -> list[torch.Tensor]:
        """A concatenated or stacked tensor as one block per rank; a view wherever it can be."""
        if whole.numel() != one.numel() * self._world:
            raise OperationMismatch(
                f"a tensor of {whole.numel()} elements does not hold {self._world} blocks of {one.numel()}"
            )
        if not whole.is_contiguous():
            raise UnsupportedOperation(
                "the concatenated tensor must be contiguous", hint="Call contiguous() on it first."
            )
        return (
            list(whole.view(-1).split(max(1, one.numel()))) if one.numel() else [whole.view(-1)] * self._world
        )

    def _check_blocks(
        self, blocks: Sequence[torch.Tensor], element: ElementType, equal: int | None = None
    ) -> None:
        if len(blocks) != self._world:
            raise OperationMismatch(f"{len(blocks)} blocks were given to a group of {self._world} ranks")
        for block in blocks:
            if _element(block) != element:
                raise OperationMismatch(
                    f"blocks of {_element(block).name} and {element.name} in one operation",
                    hint="Convert them to one dtype first.",
                )
            if equal is not None and block.numel() != equal:
                raise OperationMismatch(f"blocks of {block.numel()} and {equal} elements in one operation")


Cut = tuple[torch.Tensor, int, int]  # a flat tensor and a range of its elements


def _nothing(_: torch.Tensor) -> None:
    return None


def _only(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(tensors) != 1:
        raise UnsupportedOperation(f"{len(tensors)} tensors in one call", hint="Call it once per tensor.")
    return tensors[0]


def _op(opts: Any) -> dist.ReduceOp:
    return opts.reduceOp if opts is not None else dist.ReduceOp(dist.ReduceOp.SUM)


def _then(first: Any, second: Any) -> Any:
    def both() -> None:
        if first is not None:
            first()
        second()

    return both


def _write_back(dense_outputs: Sequence[tuple[torch.Tensor, bool]], outputs: Sequence[torch.Tensor]) -> Any:
    if not any(copied for _, copied in dense_outputs):
        return None

    def finish() -> None:
        for (values, copied), output in zip(dense_outputs, outputs, strict=True):
            if copied:
                output.copy_(values)

    return finish


def _reduce_piece(values: torch.Tensor, reduction: Reduction, *, keep: bool) -> Piece:
    nbytes = values.numel() * values.element_size()
    dtype = values.dtype

    def drain(view: torch.Tensor) -> None:
        if keep:
            reduction.drain(view.view(dtype), values)

    return Piece((nbytes,), nbytes, lambda view: reduction.fill(view.view(dtype), values), drain)


def _cut_blocks(flats: Sequence[torch.Tensor], item: int) -> list[list[Cut]]:
    """Pieces that take the same part of every block; a short block is empty in later pieces."""
    unit = item // flats[0].element_size() if flats[0].element_size() < item else 1
    longest = max(flat.numel() * flat.element_size() for flat in flats)
    cuts = []
    for lo, hi in ranges(longest, item, len(flats)):
        low, high = lo // item * unit, hi // item * unit
        cuts.append([(flat, min(low, flat.numel()), min(high, flat.numel())) for flat in flats])
    return cuts


def _scatter_piece(
    cuts: Sequence[Cut], rank: int, element: ElementType, reduction: Reduction, target: torch.Tensor
) -> Piece:
    sizes = tuple((hi - lo) * element.size for _, lo, hi in cuts)
    start = sum(sizes[:rank])

    def fill(view: torch.Tensor) -> None:
        offset = 0
        for (flat, lo, hi), size in zip(cuts, sizes, strict=True):
            reduction.fill(view[offset : offset + size].view(target.dtype), flat[lo:hi])
            offset += size

    def drain(view: torch.Tensor) -> None:
        _, lo, hi = cuts[rank]
        reduction.drain(view[start : start + sizes[rank]].view(target.dtype), target[lo:hi])

    return Piece(sizes, sum(sizes), fill, drain)


def _gather_piece(cuts: Sequence[Cut], sizes: tuple[int, ...], rank: int, mine: torch.Tensor) -> Piece:
    start = sum(sizes[:rank])

    def fill(view: torch.Tensor) -> None:
        _, lo, hi = cuts[rank]
        view[start : start + sizes[rank]].copy_(mine[lo:hi])

    def drain(view: torch.Tensor) -> None:
        offset = 0
        for (flat, lo, hi), size in zip(cuts, sizes, strict=True):
            flat[lo:hi].copy_(view[offset : offset + size])
            offset += size

    return Piece(sizes, sum(sizes), fill, drain)


def _together(works: Sequence[BackyardWork], result: list[torch.Tensor]) -> BackyardWork:
    """Several works as one."""
    whole = BackyardWork(result, max(1, len(works)), "coalesced operation")
    if not works:
        whole.piece_done(0)

    def settled(work: BackyardWork) -> None:
        if work.error is not None:
            whole.fail(work.error)
        else:
            whole.piece_done(work.finished_at_ns or 0)

    for work in works:
        work.after(settled)
    return whole
