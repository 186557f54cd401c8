"""Issuing operations: keeps a window of their pieces in flight, settles their works, counts and explains."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from prometheus_client import Counter, Histogram

from barnraise.collectives.algorithms import named
from barnraise.collectives.algorithms.cost_model import AlgorithmChoice, CostTable, choose
from barnraise.collectives.algorithms.schedule import CHAINS, BufferShapes
from barnraise.collectives.client import CommProcessClient
from barnraise.collectives.failures import error_of
from barnraise.collectives.levels import setting_for, shapes_of
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
from barnraise.collectives.shm.allocator import Block
from barnraise.collectives.shm.arena import CopyContext, SharedArena, copy_context
from barnraise.collectives.work import BarnraiseWork
from barnraise.core import metrics
from barnraise.core.config import CollectiveSettings
from barnraise.core.errors import CollectiveError, UnsupportedOperation
from barnraise.core.flow.log_once import first_time
from barnraise.planning.inputs.levels import OPEN

log = logging.getLogger("barnraise.collectives")

_WINDOW_BYTES = 64 << 20
_WINDOW_PIECES = 2  # always this many, however large
_LEAST_S = 0.001
_LARGEST_TAG = 0xFFFFFFFF

MakeCommand = Callable[[int, Chunk, Block, float], tuple[int, Command]]


class Submitter:
    """The operations of one group on this rank, in the order they were called."""

    def __init__(
        self,
        mover: CommProcessClient,
        arena: SharedArena,
        group: int,
        world: int,
        table: CostTable,
        settings: CollectiveSettings,
    ) -> None:
        self.mover = mover
        self.arena = arena
        self.group = group
        self.world = world
        self.table = table
        self._settings = settings
        self.sites: tuple[tuple[int, ...], ...] = ()  # the same on every rank, and so are the levels
        self.are_places = False
        self.levels = OPEN
        self._sequence = 0
        self._lock = threading.Lock()

    @property
    def may_use_sites(self) -> bool:
        """Also of sums in a codec's form, which no strategy of a level is about."""
        is_taken_apart = self._places > 1 and not self.levels.across.is_open
        return is_taken_apart or self._settings.strategy in ("auto", "sites")

    @property
    def _places(self) -> int:
        return len(self.sites) if self.are_places else 1

    @property
    def _shapes(self) -> BufferShapes:
        return shapes_of(self.levels) if self.are_places else CHAINS

    def collective(self, call: Operation, timeout_s: float, *, waits: bool = False) -> BarnraiseWork:
        """``waits``: the caller will wait at once, and may read the reply itself."""
        self._check(call)
        direct = waits and len(call.pieces) == 1 and self.mover.reserve_direct()
        choice = self._choose(call)
        strategy = named(choice.strategy, self._shapes)
        with self._lock:
            first = self._sequence
            self._sequence += len(call.pieces)

        def command(number: int, piece: Chunk, block: Block, left_s: float) -> tuple[int, Command]:
            operation = self.mover.number()
            specification = OperationSpec(
                call.kind,
                call.element.code,
                call.reduction,
                call.root,
                strategy,
                piece.sizes,
                choice.segment,
                choice.arity,
                self.sites if choice.strategy in ("sites", "ring") else (),
            )
            return operation, StartOperation(
                operation,
                self.group,
                first + number,
                specification,
                block.segment,
                block.offset,
                piece.nbytes,
                left_s,
                call.splits,
                direct,
            )

        work = self._fly(call, choice.strategy, timeout_s, command)
        if direct and work.error is None:
            work.read_reply = self.mover.await_direct
        elif direct:
            self.mover.release_direct()
        return work

    def point_to_point(self, call: Operation, peer: int, tag: int, timeout_s: float) -> BarnraiseWork:
        self._check(call)
        if not 0 <= tag <= _LARGEST_TAG:
            raise UnsupportedOperation(f"a tag of {tag}", hint=f"Use tags from 0 to {_LARGEST_TAG}.")
        kind = SendTo if call.kind == "send" else ReceiveFrom

        def command(_: int, piece: Chunk, block: Block, left_s: float) -> tuple[int, Command]:
            number, code = self.mover.number(), call.element.code
            place = (block.segment, block.offset, piece.nbytes)
            return number, kind(number, self.group, peer, tag, code, *place, left_s)

        return self._fly(call, "direct", timeout_s, command)

    def abort(self, why: str) -> None:
        """End every pending operation of the group, here and on every member."""
        self.mover.abort_group(self.group, why)

    def _check(self, call: Operation) -> None:
        if self.mover.inherited and self.mover.lost is not None:
            raise self.mover.lost.with_traceback(None)
        self.arena.check_device(call.device)

    def _choose(self, call: Operation) -> AlgorithmChoice:
        """One choice for the whole operation, from what all ranks know alike."""
        settings = self._settings
        size = call.agreed_bytes
        choice = choose(
            call.kind,
            size,
            self.world,
            self.table,
            setting_for(call.kind, self.levels, settings.strategy, self._places),
            arity=settings.arity,
            limit=settings.segment_bytes,
            plain_below=settings.tree_below_bytes,
            leaders=len(self.sites) if len(self.sites) > 1 else 0,
            shapes=self._shapes,
        )
        if first_time((call.kind, choice.strategy, self.world, size.bit_length())):
            log.info("%s by %s", call.kind, choice.reason)
        return choice

    def _fly(self, call: Operation, strategy: str, timeout_s: float, command: MakeCommand) -> BarnraiseWork:
        context = copy_context(call.device, call.result)
        finish = None if call.finish is None else partial(_within, context, call.finish)
        work = BarnraiseWork(call.result, len(call.pieces), call.kind, finish)
        work.after(partial(_count, call.kind, strategy, call.staged_bytes))
        _OperationPipeline(self, call, work, context, timeout_s, command).launch()
        return work


class _OperationPipeline:
    """The pieces of one operation: some under way, the rest waiting for their turn."""

    def __init__(
        self,
        issuer: Submitter,
        call: Operation,
        work: BarnraiseWork,
        context: CopyContext,
        timeout_s: float,
        command: MakeCommand,
    ) -> None:
        self._issuer, self._mover, self._arena = issuer, issuer.mover, issuer.arena
        self._call = call
        self._work = work
        self._context = context
        self._deadline = time.monotonic() + timeout_s
        self._command = command
        self._lock = threading.Lock()
        self._waiting = deque(enumerate(call.pieces))
        self._launching = False
        self._flying = 0
        self._flying_bytes = 0

    def launch(self) -> None:
        """Start pieces in their order while the window has room.

        One thread does it at a time. Another that comes (a reply was handled meanwhile) leaves at once: what
        it changed is seen by the first before that stops.
        """
        with self._lock:
            if self._launching:
                return
            self._launching = True
        while (turn := self._next()) is not None:
            self._start(*turn)

    def _next(self) -> tuple[int, Chunk] | None:
        with self._lock:
            if not self._waiting or self._work.error is not None or not self._room(self._waiting[0][1]):
                self._launching = False
                return None
            number, piece = self._waiting.popleft()
            self._flying += 1
            self._flying_bytes += piece.nbytes
            return number, piece

    def _room(self, piece: Chunk) -> bool:
        """The first piece never waits, so every operation makes progress however many there are."""
        if self._flying == 0:
            return True
        if not self._arena.has_room(piece.nbytes):
            return False
        return self._flying < _WINDOW_PIECES or self._flying_bytes + piece.nbytes <= _WINDOW_BYTES

    def _start(self, number: int, piece: Chunk) -> None:
        block = None
        try:
            block = self._arena.take(piece.nbytes)
            view = self._arena.view(block, piece.nbytes)
            with self._context():
                piece.fill(view)
            left_s = max(_LEAST_S, self._deadline - time.monotonic())
            operation, command = self._command(number, piece, block, left_s)
        except BaseException as error:
            if block is not None:
                self._arena.give_back(block)
            self._broken(error, "copied in")
            if not isinstance(error, Exception):  # Ctrl-C belongs to the program
                raise
            return
        self._mover.submit(command, operation, partial(self._done, piece, block, view))

    def _done(
        self, piece: Chunk, block: Block, view: torch.Tensor, reply: OperationFinished | OperationFailed
    ) -> None:
        """The mover has let go of the block, also where it failed."""
        if isinstance(reply, OperationFailed):
            self._work.fail(error_of(reply.failure))
        elif self._work.error is None:
            try:
                with self._context():
                    piece.drain(view)
                self._work.piece_done(reply.at_ns, reply.peer)
            except Exception as error:  # noqa: BLE001  # whatever a device says, the operation must end
                self._broken(error, "copied out")
        self._arena.give_back(block)
        with self._lock:
            self._flying -= 1
            self._flying_bytes -= piece.nbytes
        self.launch()

    def _broken(self, error: BaseException, how: str) -> None:
        """This rank cannot go on; the others must not wait for the pieces that will not come."""
        what = f"a tensor of {self._call.kind} could not be {how}: {str(error) or type(error).__name__}"
        self._work.fail(error if isinstance(error, CollectiveError) else CollectiveError(what))
        self._issuer.abort(what)


def _within(context: CopyContext, finish: Finish) -> None:
    with context():
        finish()


@lru_cache(maxsize=256)
def _counters(kind: str, strategy: str) -> tuple[Histogram, Counter]:
    return (
        metrics.collective_duration_seconds.labels(kind, strategy),
        metrics.collective_bytes_total.labels(kind, "both"),
    )


def _count(kind: str, strategy: str, nbytes: int, work: BarnraiseWork) -> None:
    if work.error is not None:
        metrics.collective_failures_total.labels(kind, work.error.code).inc()
    elif work.finished_at_ns is not None:
        duration, moved = _counters(kind, strategy)
        duration.observe((work.finished_at_ns - work.issued_at_ns) / 1e9)
        moved.inc(nbytes)
