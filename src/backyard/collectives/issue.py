"""Issuing operations: cuts them into pieces, keeps a window of them in flight, settles their works."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from backyard.collectives.client import MoverClient, error_of
from backyard.collectives.costs import CostTable, choose
from backyard.collectives.dtypes import ElementType
from backyard.collectives.messages import (
    Command,
    Failed,
    Finished,
    ReceiveFrom,
    SendTo,
    Specification,
    Start,
)
from backyard.collectives.pieces import Piece
from backyard.collectives.staging import Arena
from backyard.collectives.work import BackyardWork
from backyard.core import metrics
from backyard.core.errors import CollectiveError

_WINDOW_BYTES = 64 << 20
_WINDOW_PIECES = 2  # always this many, however large


class Issuer:
    """The operations of one group on this rank, in the order they were called."""

    def __init__(self, mover: MoverClient, arena: Arena, group: int, world: int, table: CostTable) -> None:
        self.mover = mover
        self.arena = arena
        self.group = group
        self.world = world
        self.table = table
        self._sequence = 0
        self._lock = threading.Lock()

    def collective(
        self,
        kind: str,
        element: ElementType,
        pieces: Sequence[Piece],
        result: list[torch.Tensor],
        timeout_s: float,
        *,
        reduction: str = "",
        root: int = -1,
        splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> BackyardWork:
        total = sum(piece.nbytes for piece in pieces)
        settings = self.mover.settings.collectives
        # one choice for the whole operation; splits differ by rank, so their size may decide nothing
        choice = choose(
            kind,
            0 if splits is not None else total,
            self.world,
            self.table,
            settings.strategy,
            arity=settings.arity,
            limit=settings.segment_bytes,
            plain_below=settings.tree_below_bytes,
        )
        work = self._work(kind, choice.strategy, total, result, len(pieces), finish)
        with self._lock:
            first = self._sequence
            self._sequence += len(pieces)

        def command(number: int, piece: Piece, segment: int, offset: int) -> tuple[int, Command]:
            operation = self.mover.number()
            specification = Specification(
                kind,
                element.code,
                reduction,
                root,
                choice.strategy,
                piece.sizes,
                choice.segment,
                choice.arity,
            )
            sequence = first + number
            return operation, Start(
                operation,
                self.group,
                sequence,
                specification,
                segment,
                offset,
                piece.nbytes,
                timeout_s,
                splits,
            )

        _Flight(self, work, pieces, command).launch()
        return work

    def point_to_point(
        self,
        kind: type[SendTo] | type[ReceiveFrom],
        peer: int,
        tag: int,
        element: ElementType,
        piece: Piece,
        result: list[torch.Tensor],
        timeout_s: float,
        finish: Callable[[], None] | None = None,
    ) -> BackyardWork:
        name = "send" if kind is SendTo else "receive"
        work = self._work(name, "direct", piece.nbytes, result, 1, finish)

        def command(_: int, piece: Piece, segment: int, offset: int) -> tuple[int, Command]:
            number = self.mover.number()
            fields = (number, self.group, peer, tag, element.code, segment, offset, piece.nbytes, timeout_s)
            return number, kind(*fields)

        _Flight(self, work, [piece], command).launch()
        return work

    def _work(
        self,
        kind: str,
        strategy: str,
        nbytes: int,
        result: list[torch.Tensor],
        pieces: int,
        finish: Callable[[], None] | None,
    ) -> BackyardWork:
        work = BackyardWork(result, pieces, kind)
        work.finish = finish

        def ended(done: BackyardWork) -> None:
            if done.error is not None:
                metrics.collective_failures_total.labels(kind, done.error.code).inc()
            elif done.finished_at_ns is not None:
                seconds = (done.finished_at_ns - done.issued_at_ns) / 1e9
                metrics.collective_duration_seconds.labels(kind, strategy).observe(seconds)
                metrics.collective_bytes_total.labels(kind, "both").inc(nbytes)

        work.after(ended)
        return work


class _Flight:
    """The pieces of one operation: some under way, the rest waiting for their turn."""

    def __init__(
        self,
        issuer: Issuer,
        work: BackyardWork,
        pieces: Sequence[Piece],
        command: Callable[[int, Piece, int, int], tuple[int, Command]],
    ) -> None:
        self._mover, self._arena = issuer.mover, issuer.arena
        self._work = work
        self._waiting = deque(enumerate(pieces))
        self._command = command
        self._lock = threading.Lock()
        self._flying = 0
        self._flying_bytes = 0

    def launch(self) -> None:
        """Start pieces while the window has room."""
        while True:
            with self._lock:
                if not self._waiting or self._work.error is not None:
                    return
                size = self._waiting[0][1].nbytes
                if self._flying >= _WINDOW_PIECES and self._flying_bytes + size > _WINDOW_BYTES:
                    return
                number, piece = self._waiting.popleft()
                self._flying += 1
                self._flying_bytes += size
            self._start(number, piece)

    def _start(self, number: int, piece: Piece) -> None:
        block = self._arena.take(piece.nbytes)
        view = self._arena.view(block, piece.nbytes)
        piece.fill(view)
        operation, command = self._command(number, piece, block.segment, block.offset)

        def done(reply: Finished | Failed) -> None:
            try:
                if isinstance(reply, Failed):
                    self._work.fail(error_of(reply.failure))
                elif self._work.error is None:
                    piece.drain(view)
            except Exception as error:  # a copy can fail on a device; the work must end all the same
                self._work.fail(CollectiveError(f"the result could not be copied out: {error}"))
            self._arena.give_back(block)
            with self._lock:
                self._flying -= 1
                self._flying_bytes -= piece.nbytes
            if isinstance(reply, Finished):
                self._work.piece_done(reply.at_ns, reply.peer)
                self.launch()

        self._mover.submit(command, operation, done)
