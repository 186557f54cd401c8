"""Submits operations to the communication process, as a pipeline of chunks with a bounded window."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from prometheus_client import Counter, Histogram

from barnraise.collectives.algorithms.call_settings import (
    settings_of_call,
    shapes_of,
    strategy_of_operation,
)
from barnraise.collectives.algorithms.compile import format_label
from barnraise.collectives.algorithms.cost_model import AlgorithmChoice, CostTable, choose
from barnraise.collectives.algorithms.schedule import CHAINS, OperationKind, StageShapes
from barnraise.collectives.command_channel import CommandChannel
from barnraise.collectives.failures import to_error
from barnraise.collectives.messages import (
    Command,
    OperationFailed,
    OperationFinished,
    OperationSpec,
    ReceiveFrom,
    SendTo,
    StartOperation,
)
from barnraise.collectives.ops.chunking import Chunk, Finish
from barnraise.collectives.ops.operation import Operation
from barnraise.collectives.per_call import current_options
from barnraise.collectives.shm.allocator import Block
from barnraise.collectives.shm.arena import CopyContext, SharedArena, copy_context
from barnraise.collectives.work import BarnraiseWork
from barnraise.core import metrics
from barnraise.core.config import CollectiveSettings
from barnraise.core.errors import CollectiveError, UnsupportedOperation
from barnraise.core.flow.log_once import first_time
from barnraise.core.metrics import catalogue
from barnraise.planning.inputs.levels import OPEN

log = logging.getLogger("barnraise.collectives")

_WINDOW_BYTES = 64 << 20
_WINDOW_CHUNKS = 2  # at least this many, of any size
_MIN_TIMEOUT_S = 0.001
_MAX_TAG = 0xFFFFFFFF

CommandFactory = Callable[[int, Chunk, Block, float], tuple[int, Command]]


class Submitter:
    """The operations of one group on this rank, in the order of the calls."""

    def __init__(
        self,
        comm_process: CommandChannel,
        arena: SharedArena,
        group: int,
        world: int,
        table: CostTable,
        settings: CollectiveSettings,
    ) -> None:
        self.comm_process = comm_process
        self.arena = arena
        self.group = group
        self.world = world
        self.table = table
        self._settings = settings
        self.sites: tuple[tuple[int, ...], ...] = ()  # sites and levels are equal on every rank
        self.are_places = False
        self.levels = OPEN
        self._sequence = 0
        self._lock = threading.Lock()

    @property
    def may_use_sites(self) -> bool:
        """Return True if sums may go through sites. This holds for compressed sums as well."""
        is_taken_apart = self._places > 1 and not self.levels.across.is_open
        general = strategy_of_operation(OperationKind.ALL_REDUCE, self._settings)
        return is_taken_apart or general in ("auto", "sites")

    @property
    def _places(self) -> int:
        return len(self.sites) if self.are_places else 1

    @property
    def _shapes(self) -> StageShapes:
        return shapes_of(self.levels) if self.are_places else CHAINS

    def submit_collective(self, call: Operation, timeout_s: float, *, waits: bool = False) -> BarnraiseWork:
        """Submit a collective operation and return its work.

        ``waits``: the caller waits at once and may read the reply itself.
        """
        self._check(call)
        choice = self._choose(call)
        direct = waits and len(call.chunks) == 1 and self.comm_process.reserve_direct()
        algorithm = format_label(choice.algorithm, self._shapes)
        with self._lock:
            first = self._sequence
            self._sequence += len(call.chunks)

        def command(number: int, chunk: Chunk, block: Block, left_s: float) -> tuple[int, Command]:
            operation = self.comm_process.next_id()
            specification = OperationSpec(
                call.kind,
                call.element.code,
                call.reduction,
                call.root,
                algorithm,
                chunk.sizes,
                choice.segment,
                choice.arity,
                self.sites if choice.algorithm in ("sites", "ring") else (),
            )
            return operation, StartOperation(
                operation,
                self.group,
                first + number,
                specification,
                block.segment,
                block.offset,
                chunk.nbytes,
                left_s,
                call.splits,
                direct,
            )

        work = self._submit(call, choice.algorithm, timeout_s, command)
        if direct and work.error is None:
            work.read_reply = self.comm_process.wait_direct
        elif direct:
            self.comm_process.release_direct()
        return work

    def submit_point_to_point(
        self, call: Operation, peer: int, tag: int, timeout_s: float, *, fails_alone: bool = False
    ) -> BarnraiseWork:
        """Submit a send or a receive and return its work.

        ``fails_alone``: a receive that gets no message in time leaves the group usable.
        """
        self._check(call)
        if not 0 <= tag <= _MAX_TAG:
            raise UnsupportedOperation(f"a tag of {tag}", hint=f"Use tags from 0 to {_MAX_TAG}.")

        def command(_: int, chunk: Chunk, block: Block, left_s: float) -> tuple[int, Command]:
            number, code = self.comm_process.next_id(), call.element.code
            place = (block.segment, block.offset, chunk.nbytes)
            if call.kind == "send":
                return number, SendTo(number, self.group, peer, tag, code, *place, left_s)
            return number, ReceiveFrom(number, self.group, peer, tag, code, *place, left_s, fails_alone)

        return self._submit(call, "direct", timeout_s, command)

    def abort(self, why: str) -> None:
        """Fail every pending operation of the group, on this rank and on every member."""
        self.comm_process.abort_group(self.group, why)

    def _check(self, call: Operation) -> None:
        self.comm_process.check_usable()
        self.arena.check_device(call.device)

    def _choose(self, call: Operation) -> AlgorithmChoice:
        """Choose the algorithm for a whole operation, from values that are equal on all ranks."""
        settings = self._settings
        chosen = settings_of_call(call.kind, settings, self.levels, self._places, current_options())
        size = call.agreed_bytes
        choice = choose(
            call.kind,
            size,
            self.world,
            self.table,
            chosen.strategy,
            arity=chosen.arity,
            limit=settings.segment_bytes,
            plain_below=chosen.tree_below_bytes,
            strict=chosen.is_required,
            leaders=len(self.sites) if len(self.sites) > 1 else 0,
            shapes=self._shapes,
        )
        if first_time((call.kind, choice.algorithm, self.world, size.bit_length())):
            log.info("%s by %s", call.kind, choice.reason)
        return choice

    def _submit(
        self, call: Operation, algorithm: str, timeout_s: float, command: CommandFactory
    ) -> BarnraiseWork:
        context = copy_context(call.device, call.result)
        finish = None if call.finish is None else partial(_run_within, context, call.finish)
        work = BarnraiseWork(call.result, len(call.chunks), call.kind, finish)
        work.add_listener(partial(_count, call.kind, algorithm, call.staged_bytes))
        pipeline = _OperationPipeline(self, call, work, context, timeout_s, command)
        work.cancel = pipeline.cancel
        pipeline.submit_ready()
        return work


class _OperationPipeline:
    """The chunks of one operation: some in flight, the others queued."""

    def __init__(
        self,
        submitter: Submitter,
        call: Operation,
        work: BarnraiseWork,
        context: CopyContext,
        timeout_s: float,
        command: CommandFactory,
    ) -> None:
        self._submitter, self._comm_process, self._arena = submitter, submitter.comm_process, submitter.arena
        self._call = call
        self._work = work
        self._context = context
        self._deadline = time.monotonic() + timeout_s
        self._command = command
        self._lock = threading.Lock()
        self._queued = deque(enumerate(call.chunks))
        self._submitting = False
        self._in_flight = 0
        self._bytes_in_flight = 0
        self._operations: set[int] = set()  # numbers of the chunks in flight
        self._is_cancelled = False

    def submit_ready(self) -> None:
        """Submit chunks in order while the window has room.

        Only one thread submits at a time. A second thread, which handled a reply meanwhile, returns at
        once: the first thread sees its change before it stops.
        """
        with self._lock:
            if self._submitting:
                return
            self._submitting = True
        while (entry := self._next_chunk()) is not None:
            self._submit_chunk(*entry)

    def _next_chunk(self) -> tuple[int, Chunk] | None:
        with self._lock:
            if not self._queued or self._work.error is not None or not self._has_room(self._queued[0][1]):
                self._submitting = False
                return None
            number, chunk = self._queued.popleft()
            self._in_flight += 1
            self._bytes_in_flight += chunk.nbytes
            return number, chunk

    def _has_room(self, chunk: Chunk) -> bool:
        """Return True if one more chunk may be in flight.

        The first chunk never waits, so every operation makes progress.
        """
        if self._in_flight == 0:
            return True
        if not self._arena.has_room(chunk.nbytes):
            return False
        return self._in_flight < _WINDOW_CHUNKS or self._bytes_in_flight + chunk.nbytes <= _WINDOW_BYTES

    def _submit_chunk(self, number: int, chunk: Chunk) -> None:
        block = None
        try:
            block = self._arena.allocate(chunk.nbytes)
            view = self._arena.view(block, chunk.nbytes)
            with self._context():
                chunk.fill(view)
            left_s = max(_MIN_TIMEOUT_S, self._deadline - time.monotonic())
            operation, command = self._command(number, chunk, block, left_s)
        except BaseException as error:
            if block is not None:
                self._arena.free(block)
            self._fail(error, "copied in")
            if not isinstance(error, Exception):  # Ctrl-C belongs to the script
                raise
            return
        with self._lock:
            self._operations.add(operation)
        self._comm_process.submit(command, operation, partial(self._on_reply, chunk, block, view))
        with self._lock:
            is_cancelled = self._is_cancelled
        if is_cancelled:
            self._comm_process.cancel_operation(operation, self._submitter.group)

    def cancel(self) -> None:
        """Time the operation out now. Chunks that are submitted later time out at once, too."""
        with self._lock:
            self._is_cancelled = True
            operations = sorted(self._operations)
        for operation in operations:
            self._comm_process.cancel_operation(operation, self._submitter.group)

    def _on_reply(
        self, chunk: Chunk, block: Block, view: torch.Tensor, reply: OperationFinished | OperationFailed
    ) -> None:
        """Copy a chunk's result out and free its block.

        After the reply the communication process does not use the block, even if the operation failed.
        """
        if isinstance(reply, OperationFailed):
            self._work.fail(to_error(reply.failure))
        elif self._work.error is None:
            try:
                with self._context():
                    chunk.drain(view)
                self._work.complete_chunk(reply.at_ns, reply.peer)
            except Exception as error:  # noqa: BLE001  # the operation must complete on any device error
                self._fail(error, "copied out")
        self._arena.free(block)
        with self._lock:
            self._in_flight -= 1
            self._bytes_in_flight -= chunk.nbytes
            self._operations.discard(reply.operation)
        self.submit_ready()

    def _fail(self, error: BaseException, how: str) -> None:
        """Fail the operation and abort the group, so that other ranks do not wait for the missing chunks."""
        what = f"a tensor of {self._call.kind} could not be {how}: {str(error) or type(error).__name__}"
        self._work.fail(error if isinstance(error, CollectiveError) else CollectiveError(what))
        self._submitter.abort(what)


def _run_within(context: CopyContext, finish: Finish) -> None:
    with context():
        finish()


@lru_cache(maxsize=256)
def _counters(kind: str, algorithm: str) -> tuple[Histogram, Counter]:
    return (
        metrics.histogram(catalogue.COLLECTIVE_TIME, kind, algorithm),
        metrics.counter(catalogue.COLLECTIVE_BYTES, kind),
    )


def _count(kind: str, algorithm: str, nbytes: int, work: BarnraiseWork) -> None:
    if work.error is not None:
        metrics.counter(catalogue.COLLECTIVE_FAILURES, kind, work.error.code).inc()
    elif work.finished_at_ns is not None:
        duration, moved = _counters(kind, algorithm)
        duration.observe((work.finished_at_ns - work.submitted_at_ns) / 1e9)
        moved.inc(nbytes)
