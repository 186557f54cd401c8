"""Healing beside training: a newcomer gets the state while the others go on, then follows their results.

At one commit every member keeps a copy of the state: the snapshot. The newcomer and the members form a group
of their own, in which every member that has the snapshot sends its stripe of what the newcomer lacks. From
then on the first of them sends the reduced result of each later step, and the newcomer applies it itself,
until it is let in. If that group breaks, the next one goes on with what is still lacking.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, Protocol

import msgspec
import torch
from msgspec import Meta

from barnraise.checkpoint.serialization import FlatState, byte_view, digest
from barnraise.core.decoding import decode
from barnraise.core.errors import BarnraiseError, ProtocolError
from barnraise.training.recovery.state_transfer import (
    LARGEST_SKELETON,
    TensorChannel,
    chunks,
    receive_bytes,
    receive_stripes,
    room_for,
    send_bytes,
    send_stripe,
)

log = logging.getLogger("barnraise.training")

_MOST_KEPT_BYTES = 1 << 30  # of results, for a newcomer that is behind
_NEAR = 1  # steps behind the others at which it may be let in
_PATIENT = 3  # results in a row that may leave it as far behind as before

Step = Annotated[int, Meta(ge=-1, le=1 << 50)]
Number = Annotated[int, Meta(ge=0, le=1 << 42)]


class RecoveryGroup(TensorChannel, Protocol):
    """The group of a nursery. Every method may raise CollectiveError: then it has broken."""

    rank: int
    world: int
    members: int  # the first so many ranks train; the others are newcomers

    def gather(self, word: bytes) -> list[bytes]: ...

    def close(self) -> None: ...


class CommittedStep(msgspec.Struct, frozen=True):
    """All that a commit needs: the sum over all members before it is divided, and what else they summed."""

    done: int  # steps that are committed with it
    epoch: int
    clip: float | None
    tensors: list[torch.Tensor]
    batches: int = 1  # of the data that it covers

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class _RecoveryStatus(msgspec.Struct, frozen=True, array_like=True):
    """Of which snapshot one has a part or all; a newcomer also says what of it is lacking."""

    step: Step
    # Chunks from the first to the last, without it.
    lacks: Annotated[tuple[tuple[Number, Number], ...], Meta(max_length=1 << 16)] = ()
    done: Step = -1  # a newcomer that had all of it, and followed so far


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What comes next. ``newest``: how many steps the others have committed by now."""

    newest: Step
    done: Step  # with the result that follows; -1: nothing follows, the newcomer may be let in
    clip: float | None = None
    tensors: Annotated[tuple[Number, ...], Meta(max_length=4096)] = ()  # their sizes in bytes
    digest: bytes = b""
    epoch: Step = 0
    batches: Annotated[int, Meta(ge=0, le=1 << 20)] = 1
    is_late: bool = False  # more results came meanwhile than could be kept: the newcomer cannot follow


_words = msgspec.msgpack.Decoder(_RecoveryStatus)
_heads = msgspec.msgpack.Decoder(_Head)


class StateDonor:
    """A member's side: the snapshot, and the results since. A thread of its own sends them."""

    def __init__(self, snapshot: FlatState, step: int) -> None:
        self.step = step
        self._snapshot = FlatState(
            snapshot.skeleton, [one.detach().cpu().clone() for one in snapshot.tensors]
        )
        self._digest = b""
        self._results: list[CommittedStep] = []
        self._is_late = False
        self._newest = step
        self._kept_bytes = 0
        self._attempt = 0
        self._finished = 0  # the last attempt that is to end
        self._changed = threading.Condition()

    @property
    def is_stale(self) -> bool:
        """There were more results to send than could be kept: better begin anew."""
        return self._is_late

    def note(self, result: CommittedStep) -> None:
        """A step is about to be committed."""
        with self._changed:
            self._kept_bytes += result.bytes
            if self._kept_bytes > _MOST_KEPT_BYTES:
                self._is_late = True
                self._results.clear()
            if not self._is_late:
                self._results.append(result)
            self._newest = result.done
            self._changed.notify_all()

    def begin(self, open_room: Callable[[], RecoveryGroup]) -> None:
        """Try with this group; an earlier one has broken, or is given up."""
        with self._changed:
            self._attempt += 1
            self._changed.notify_all()
        threading.Thread(
            target=self._serve, args=(self._attempt, open_room), name="barnraise-nursery", daemon=True
        ).start()

    def finish(self) -> None:
        """The members meet anew, perhaps with those who were near: send what was noted, then end it."""
        with self._changed:
            self._finished = self._attempt
            self._changed.notify_all()

    def _serve(self, attempt: int, open_room: Callable[[], RecoveryGroup]) -> None:
        room: RecoveryGroup | None = None
        try:
            room = open_room()
            self._give(attempt, room)
        except (BarnraiseError, RuntimeError) as error:
            log.info("a newcomer could not be served to the end: %s", error)
        finally:
            if room is not None:
                room.close()

    def _give(self, attempt: int, room: RecoveryGroup) -> None:
        said = _gather(room, _RecoveryStatus(self.step))
        step = _snapshot_of(said, room.members)
        donors = [rank for rank in range(room.members) if said[rank].step == step]
        newcomers = range(room.members, room.world)
        lacking = [rank for rank in newcomers if said[rank].step != step or said[rank].done < 0]
        if room.rank in donors:
            place = donors.index(room.rank)
            buffers = chunks(self._snapshot.tensors)
            if place == 0:
                self._digest = self._digest or digest(self._snapshot)
                for rank in lacking:
                    if said[rank].step != step:
                        send_bytes(room, self._snapshot.skeleton, rank)
                    send_bytes(room, msgspec.msgpack.encode(_Head(step, step, digest=self._digest)), rank)
            for rank in lacking:
                lacks = _numbers(said[rank], step, len(buffers))
                send_stripe(room, [buffers[one] for one in lacks], rank, place, len(donors))
        if room.rank == donors[0]:
            self._follow(attempt, room, {rank: max(said[rank].done, step) for rank in newcomers})
        room.gather(b"")  # the others stay until the newcomer has all: a member that leaves breaks the group

    def _follow(self, attempt: int, room: RecoveryGroup, newcomers: dict[int, int]) -> None:
        """``newcomers``: how far each of them is."""
        position = min(newcomers.values())
        for rank in newcomers:
            send_bytes(room, msgspec.msgpack.encode(_Head(self._newest, position)), rank)
        while True:
            with self._changed:
                while self._newest == position and self._finished < attempt == self._attempt:
                    self._changed.wait(1.0)
                if self._attempt != attempt:
                    raise ProtocolError("another attempt has begun")
                rest = [result for result in self._results if result.done > position]
                newest = self._newest
                if self._is_late:
                    position = newest
            if self._is_late:
                for rank in newcomers:
                    send_bytes(room, msgspec.msgpack.encode(_Head(newest, newest, is_late=True)), rank)
            for result in rest:
                buffers = [byte_view(tensor.contiguous()) for tensor in result.tensors]
                sizes = tuple(buffer.numel() for buffer in buffers)
                head = msgspec.msgpack.encode(
                    _Head(newest, result.done, result.clip, sizes, epoch=result.epoch, batches=result.batches)
                )
                for rank in (one for one, done in newcomers.items() if done < result.done):
                    send_bytes(room, head, rank)
                    send_stripe(room, chunks(buffers), rank)
                position = result.done
            if not rest and self._finished >= attempt:
                for rank in newcomers:
                    send_bytes(room, msgspec.msgpack.encode(_Head(newest, -1)), rank)
                return


class RecoveryStats(NamedTuple):
    """How the state came to a newcomer."""

    bytes: int
    seconds: float
    donors: int


class JoiningWorker:
    """The other side: keeps what has come, whatever groups break meanwhile."""

    def __init__(self) -> None:
        self.done = -1  # steps behind its state, once it has one
        self.healed: RecoveryStats | None = None
        self._most_bytes = 0
        self._skeleton = b""
        self._step = -1
        self._tensors: list[torch.Tensor] = []
        self._has: set[int] = set()

    def be_nursed(
        self,
        room: RecoveryGroup,
        most_bytes: int,
        load: Callable[[FlatState], int],
        apply: Callable[[CommittedStep], None],
        on_near: Callable[[], None],
    ) -> None:
        """Until it is let in. CollectiveError if the group breaks: then again, in another.

        ``most_bytes``: of a state or a result that could be this model's.
        """
        self._most_bytes = most_bytes
        said = _gather(room, _RecoveryStatus(self._step, self._lacking(), self.done))
        step = _snapshot_of(said, room.members)
        donors = [rank for rank in range(room.members) if said[rank].step == step]
        if step < 0:
            raise ProtocolError("nobody has a state for this newcomer")
        if step != self._step or self.done < 0:
            self._take_snapshot(room, donors, step, load)
        self._follow(room, donors[0], apply, on_near)
        room.gather(b"")

    def _take_snapshot(
        self, room: RecoveryGroup, donors: Sequence[int], step: int, load: Callable[[FlatState], int]
    ) -> None:
        if step != self._step:
            self._forget()
            self._skeleton = receive_bytes(room, donors[0], LARGEST_SKELETON)
            self._tensors = room_for(self._skeleton, self._most_bytes)
            self._step = step
        head = decode(_heads, receive_bytes(room, donors[0], 4096), "a donor's word cannot be read")
        begin = time.monotonic()
        buffers = chunks(self._tensors)
        lacks = [number for number in range(len(buffers)) if number not in self._has]
        pieces = [buffers[number] for number in lacks]
        receive_stripes(room, pieces, donors, lambda place: self._has.add(lacks[place]))
        parts = FlatState(self._skeleton, self._tensors)
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)
        self.healed = RecoveryStats(size, time.monotonic() - begin, len(donors))
        if digest(parts) != head.digest:
            self._forget()
            raise ProtocolError("the state that came has another hash than was promised")
        self.done = load(parts)
        self._tensors, self._has = [], set()

    def _follow(
        self,
        room: RecoveryGroup,
        donor: int,
        apply: Callable[[CommittedStep], None],
        on_near: Callable[[], None],
    ) -> None:
        behind: deque[int] = deque(maxlen=_PATIENT)
        while True:
            data = receive_bytes(room, donor, 1 << 20)
            head = decode(_heads, data, "a donor's word cannot be read")
            if head.done < 0:
                return
            if head.tensors:
                if sum(head.tensors) > self._most_bytes:
                    raise ProtocolError("a donor announces more than there can be")
                buffers = [torch.empty(size, dtype=torch.uint8) for size in head.tensors]
                receive_stripes(room, chunks(buffers), [donor], lambda place: None)
                apply(CommittedStep(head.done, head.epoch, head.clip, buffers, head.batches))
                self.done = head.done
            behind.append(head.newest - self.done)
            stays = head.is_late or (len(behind) == _PATIENT and behind[-1] >= behind[0])
            if behind[-1] <= _NEAR or stays:
                if behind[-1] > _NEAR:
                    log.warning("this worker stays %d steps behind: the others wait for it once", behind[-1])
                on_near()

    def _lacking(self) -> tuple[tuple[int, int], ...]:
        spans: list[tuple[int, int]] = []
        for number in range(len(chunks(self._tensors))):
            if number in self._has:
                continue
            if spans and spans[-1][1] == number:
                spans[-1] = (spans[-1][0], number + 1)
            else:
                spans.append((number, number + 1))
        return tuple(spans)

    def _forget(self) -> None:
        self.done, self._step = -1, -1
        self._skeleton, self._tensors, self._has = b"", [], set()


def _gather(room: RecoveryGroup, word: _RecoveryStatus) -> list[_RecoveryStatus]:
    said = room.gather(msgspec.msgpack.encode(word))
    return [decode(_words, data, "what is said in a nursery cannot be read") for data in said]


def _snapshot_of(said: Sequence[_RecoveryStatus], members: int) -> int:
    """The snapshot to send: one that newcomers have a part of, if somebody still has it; else the newest."""
    there = {word.step for word in said[:members]}
    begun = {word.step for word in said[members:]} & there
    return max(begun or there)


def _numbers(word: _RecoveryStatus, step: int, count: int) -> list[int]:
    """The chunks that a newcomer lacks."""
    if word.step != step:
        return list(range(count))
    spans = (range(first, min(last, count)) for first, last in word.lacks)
    return sorted({number for span in spans for number in span})
