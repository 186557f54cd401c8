"""Live recovery: a joining worker receives the state while the others train, then replays their steps.

At one commit every training worker copies the state: the snapshot. Training workers and joining workers form
a second process group. In it, every worker that has the snapshot sends its stripe of the missing chunks. Then
the first of these donors sends the reduced result of each later step. The joining worker replays it until it
joins the training group. If the second group fails, the next one continues with the chunks that are still
missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import msgspec
import torch
from msgspec import Meta

from barnraise.checkpoint.serialization import FlatState, byte_view, digest
from barnraise.core.decoding import decode
from barnraise.core.errors import BarnraiseError, CollectiveError, ProtocolError
from barnraise.training.group.interface import GroupManager, RecoveryGroup
from barnraise.training.recovery.state_transfer import (
    MAX_SKELETON,
    allocate,
    chunks,
    receive_bytes,
    receive_stripes,
    send_bytes,
    send_stripe,
)

log = logging.getLogger("barnraise.training")

_MAX_BACKLOG_BYTES = 1 << 30  # of results that a joining worker has not replayed yet
_CAUGHT_UP = 1  # steps behind the others at which a joining worker may join the group
_PATIENCE = 3  # results in a row that may leave it as far behind as before
_FAILURES_PER_WARNING = 5
_UNREADABLE = "a donor's message cannot be read"

Step = Annotated[int, Meta(ge=-1, le=1 << 50)]
Number = Annotated[int, Meta(ge=0, le=1 << 42)]


class CommittedStep(msgspec.Struct, frozen=True):
    """All that a replay needs of a commit: the totals before division, and what else was summed."""

    done: int  # committed steps, with this one
    epoch: int
    clip: float | None
    tensors: list[torch.Tensor]
    batches: int = 1  # batches of the data that it covers

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class _RecoveryStatus(msgspec.Struct, frozen=True, array_like=True):
    """The snapshot that a rank holds, fully or partly; a joining rank also lists its missing chunks."""

    step: Step
    # Ranges of chunk numbers, the last one excluded.
    missing: Annotated[tuple[tuple[Number, Number], ...], Meta(max_length=1 << 16)] = ()
    done: Step = -1  # steps of a joining worker that has the whole snapshot and has replayed more


class _StepHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of a snapshot or of a result. ``newest``: steps that the training workers have committed."""

    newest: Step
    done: Step  # with the result that follows; -1: nothing follows, the worker may join the group
    clip: float | None = None
    tensors: Annotated[tuple[Number, ...], Meta(max_length=4096)] = ()  # sizes in bytes
    digest: bytes = b""
    epoch: Step = 0
    batches: Annotated[int, Meta(ge=0, le=1 << 20)] = 1
    is_backlog_lost: bool = False  # results were dropped, so the joining worker cannot catch up


_statuses = msgspec.msgpack.Decoder(_RecoveryStatus)
_headers = msgspec.msgpack.Decoder(_StepHeader)


class StateDonor:
    """A training worker's side of live recovery: the snapshot and the results since, sent by a thread."""

    def __init__(self, snapshot: FlatState, step: int) -> None:
        self.step = step
        self._snapshot = FlatState(
            snapshot.skeleton, [tensor.detach().cpu().clone() for tensor in snapshot.tensors]
        )
        self._digest = b""
        self._results: list[CommittedStep] = []
        self._is_backlog_lost = False
        self._newest = step
        self._backlog_bytes = 0
        self._attempt = 0
        self._last_attempt = 0  # attempts up to this one shall finish
        self._changed = threading.Condition()

    @property
    def is_stale(self) -> bool:
        """Return True if results were dropped, so that a new snapshot is better."""
        return self._is_backlog_lost

    def note_commit(self, result: CommittedStep) -> None:
        """Queue the result of a step for the joining workers."""
        with self._changed:
            self._backlog_bytes += result.bytes
            if self._backlog_bytes > _MAX_BACKLOG_BYTES:
                self._is_backlog_lost = True
                self._results.clear()
            if not self._is_backlog_lost:
                self._results.append(result)
            self._newest = result.done
            self._changed.notify_all()

    def start(self, open_group: Callable[[], RecoveryGroup]) -> None:
        """Start an attempt with a new recovery group; an earlier attempt is abandoned."""
        with self._changed:
            self._attempt += 1
            self._changed.notify_all()
        threading.Thread(
            target=self._serve, args=(self._attempt, open_group), name="barnraise-recovery", daemon=True
        ).start()

    def finish(self) -> None:
        """Send the queued results, then end the attempt, because the training workers form a new group."""
        with self._changed:
            self._last_attempt = self._attempt
            self._changed.notify_all()

    def _serve(self, attempt: int, open_group: Callable[[], RecoveryGroup]) -> None:
        group: RecoveryGroup | None = None
        try:
            group = open_group()
            self._donate(attempt, group)
        except (BarnraiseError, RuntimeError) as error:
            log.info("the state was not sent completely to a joining worker: %s", error)
        finally:
            if group is not None:
                group.close()

    def _donate(self, attempt: int, group: RecoveryGroup) -> None:
        """Send the missing chunks of the snapshot, then the results."""
        statuses = _exchange_statuses(group, _RecoveryStatus(self.step))
        step = _choose_snapshot(statuses, group.training_world)
        donors = [rank for rank in range(group.training_world) if statuses[rank].step == step]
        joining = range(group.training_world, group.world)
        receivers = [rank for rank in joining if statuses[rank].step != step or statuses[rank].done < 0]
        if group.rank in donors:
            place = donors.index(group.rank)
            buffers = chunks(self._snapshot.tensors)
            if place == 0:
                self._digest = self._digest or digest(self._snapshot)
                header = msgspec.msgpack.encode(_StepHeader(step, step, digest=self._digest))
                for rank in receivers:
                    if statuses[rank].step != step:
                        send_bytes(group, self._snapshot.skeleton, rank)
                    send_bytes(group, header, rank)
            for rank in receivers:
                missing = _missing_chunks(statuses[rank], step, len(buffers))
                send_stripe(group, [buffers[number] for number in missing], rank, place, len(donors))
        if group.rank == donors[0]:
            self._send_results(attempt, group, {rank: max(statuses[rank].done, step) for rank in joining})
        # The other donors stay until all is received: a worker that leaves would break the group.
        group.all_gather_bytes(b"")

    def _send_results(self, attempt: int, group: RecoveryGroup, joining: dict[int, int]) -> None:
        """Send results as they are committed; ``joining``: committed steps of each joining rank."""
        position = min(joining.values())
        for rank in joining:
            send_bytes(group, msgspec.msgpack.encode(_StepHeader(self._newest, position)), rank)
        while True:
            with self._changed:
                while self._newest == position and self._last_attempt < attempt == self._attempt:
                    self._changed.wait(1.0)
                if self._attempt != attempt:
                    raise ProtocolError("another recovery attempt has started")
                results = [result for result in self._results if result.done > position]
                newest = self._newest
                if self._is_backlog_lost:
                    position = newest
            if self._is_backlog_lost:
                lost = msgspec.msgpack.encode(_StepHeader(newest, newest, is_backlog_lost=True))
                for rank in joining:
                    send_bytes(group, lost, rank)
            for result in results:
                self._send_result(group, result, newest, joining)
                position = result.done
            if not results and self._last_attempt >= attempt:
                for rank in joining:
                    send_bytes(group, msgspec.msgpack.encode(_StepHeader(newest, -1)), rank)
                return

    def _send_result(
        self, group: RecoveryGroup, result: CommittedStep, newest: int, joining: dict[int, int]
    ) -> None:
        buffers = [byte_view(tensor.contiguous()) for tensor in result.tensors]
        sizes = tuple(buffer.numel() for buffer in buffers)
        header = msgspec.msgpack.encode(
            _StepHeader(newest, result.done, result.clip, sizes, epoch=result.epoch, batches=result.batches)
        )
        for rank in (rank for rank, done in joining.items() if done < result.done):
            send_bytes(group, header, rank)
            send_stripe(group, chunks(buffers), rank)


class RecoveryStats(NamedTuple):
    """Size, duration and number of donors of a live recovery."""

    bytes: int
    seconds: float
    donors: int


class JoiningWorker:
    """A joining worker's side of live recovery; keeps received chunks when a recovery group fails.

    ``done``: steps of its state, -1 without one.
    """

    def __init__(self) -> None:
        self.done = -1
        self.stats: RecoveryStats | None = None
        self._max_bytes = 0
        self._skeleton = b""
        self._step = -1
        self._tensors: list[torch.Tensor] = []
        self._received: set[int] = set()

    def recover(
        self,
        group: RecoveryGroup,
        max_bytes: int,
        load: Callable[[FlatState], int],
        replay: Callable[[CommittedStep], None],
        on_caught_up: Callable[[], None],
    ) -> None:
        """Receive the state and replay steps until this worker joins the group.

        Raise CollectiveError if the group fails; then call it again with another group. ``max_bytes``: limit
        for the size of a state or a result.
        """
        self._max_bytes = max_bytes
        statuses = _exchange_statuses(group, _RecoveryStatus(self._step, self._missing(), self.done))
        step = _choose_snapshot(statuses, group.training_world)
        donors = [rank for rank in range(group.training_world) if statuses[rank].step == step]
        if step < 0:
            raise ProtocolError("no worker has a state for this joining worker")
        if step != self._step or self.done < 0:
            self._receive_snapshot(group, donors, step, load)
        self._replay_results(group, donors[0], replay, on_caught_up)
        group.all_gather_bytes(b"")

    def _receive_snapshot(
        self, group: RecoveryGroup, donors: Sequence[int], step: int, load: Callable[[FlatState], int]
    ) -> None:
        if step != self._step:
            self._reset()
            self._skeleton = receive_bytes(group, donors[0], MAX_SKELETON)
            self._tensors = allocate(self._skeleton, self._max_bytes)
            self._step = step
        header = decode(_headers, receive_bytes(group, donors[0], 4096), _UNREADABLE)
        start = time.monotonic()
        buffers = chunks(self._tensors)
        missing = [number for number in range(len(buffers)) if number not in self._received]
        pieces = [buffers[number] for number in missing]
        receive_stripes(group, pieces, donors, lambda index: self._received.add(missing[index]))
        parts = FlatState(self._skeleton, self._tensors)
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)
        self.stats = RecoveryStats(size, time.monotonic() - start, len(donors))
        if digest(parts) != header.digest:
            self._reset()
            raise ProtocolError("the received state does not have the hash that was announced")
        self.done = load(parts)
        self._tensors, self._received = [], set()

    def _replay_results(
        self,
        group: RecoveryGroup,
        donor: int,
        replay: Callable[[CommittedStep], None],
        on_caught_up: Callable[[], None],
    ) -> None:
        lags: deque[int] = deque(maxlen=_PATIENCE)
        while True:
            header = decode(_headers, receive_bytes(group, donor, 1 << 20), _UNREADABLE)
            if header.done < 0:
                return
            if header.tensors:
                if sum(header.tensors) > self._max_bytes:
                    raise ProtocolError("a donor announces a result that is too large")
                buffers = [torch.empty(size, dtype=torch.uint8) for size in header.tensors]
                receive_stripes(group, chunks(buffers), [donor], lambda index: None)
                replay(CommittedStep(header.done, header.epoch, header.clip, buffers, header.batches))
                self.done = header.done
            lags.append(header.newest - self.done)
            is_stuck = header.is_backlog_lost or (len(lags) == _PATIENCE and lags[-1] >= lags[0])
            if lags[-1] <= _CAUGHT_UP or is_stuck:
                if lags[-1] > _CAUGHT_UP:
                    log.warning(
                        "this worker stays %d steps behind; the others will wait for it once", lags[-1]
                    )
                on_caught_up()

    def _missing(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of chunks that were not received."""
        spans: list[tuple[int, int]] = []
        for number in range(len(chunks(self._tensors))):
            if number in self._received:
                continue
            if spans and spans[-1][1] == number:
                spans[-1] = (spans[-1][0], number + 1)
            else:
                spans.append((number, number + 1))
        return tuple(spans)

    def _reset(self) -> None:
        self.done, self._step = -1, -1
        self._skeleton, self._tensors, self._received = b"", [], set()


class RecoveryCoordinator:
    """Starts live recovery after a commit at which all training workers know of the same attempt."""

    def __init__(self, manager: GroupManager) -> None:
        self._manager = manager
        self._donor: StateDonor | None = None
        self._attempt = 0
        self._known: set[int] = set()  # attempts that training workers knew of at the last commit
        manager.on_next_group = self._on_next_group

    def start_group(self) -> None:
        """Forget what the training workers of the last group knew."""
        self._known = {0}

    def note_commit(self, result: Callable[[], CommittedStep]) -> None:
        """Queue the result of a step, if there are joining workers."""
        if self._donor is not None:
            self._donor.note_commit(result())

    def set_known(self, attempts: set[int]) -> bool:
        """Set the attempts that training workers know of at this commit. Return True if they have changed."""
        has_changed, self._known = attempts != self._known, attempts
        return has_changed

    def start(self, snapshot: Callable[[], FlatState], done: int) -> None:
        """Start the attempt that all training workers know of, with the committed state as the snapshot."""
        if len(self._known) != 1 or self._known == {self._attempt}:
            return
        (number,) = self._known
        if not number:
            if self._donor is not None and self._manager.newest_generation() <= self._manager.generation:
                self._donor.finish()  # the joining workers are gone
                self._donor = None
            return
        opener = self._manager.recovery_opener(number)
        if opener is None:
            return  # there is a newer attempt already
        self._attempt = number
        if self._donor is None or self._donor.is_stale:
            self._donor = StateDonor(snapshot(), done)
        self._donor.start(opener)

    def _on_next_group(self, attempt: int) -> None:
        if self._donor is not None:
            self._donor.finish()
            self._donor = self._donor if attempt else None


def recover_live(
    manager: GroupManager,
    worker: JoiningWorker,
    max_bytes: int,
    load: Callable[[FlatState], int],
    replay: Callable[[CommittedStep], None],
) -> None:
    """Receive the state and replay steps while the others train, until this worker has joined the group."""
    failures = 0
    while (group := manager.wait_for_recovery_group()) is not None:
        try:
            worker.recover(group, max_bytes, load, replay, manager.report_caught_up)
        except (CollectiveError, ProtocolError) as error:
            failures += 1
            level = logging.WARNING if failures % _FAILURES_PER_WARNING == 0 else logging.INFO
            log.log(level, "live recovery failed and is retried: %s", error.message)
            manager.report_recovery_failed()
        finally:
            group.close()


def _exchange_statuses(group: RecoveryGroup, own: _RecoveryStatus) -> list[_RecoveryStatus]:
    messages = group.all_gather_bytes(msgspec.msgpack.encode(own))
    return [decode(_statuses, message, "a recovery status cannot be read") for message in messages]


def _choose_snapshot(statuses: Sequence[_RecoveryStatus], training_world: int) -> int:
    """Return the step of the snapshot to send: one that joining ranks hold partly, else the newest."""
    available = {status.step for status in statuses[:training_world]}
    partly_received = {status.step for status in statuses[training_world:]} & available
    return max(partly_received or available)


def _missing_chunks(status: _RecoveryStatus, step: int, count: int) -> list[int]:
    """Return the chunks that a joining rank has not received."""
    if status.step != step:
        return list(range(count))
    spans = (range(first, min(last, count)) for first, last in status.missing)
    return sorted({number for span in spans for number in span})
