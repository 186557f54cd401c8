"""Exchange of a map's results between the workers of a group, in rounds, while they compute.

In each round every worker reports its load and sends a piece of its results. All of them then draw the same
conclusions: which items are finished, and which worker computes which items next (``runs.map_schedule``).

After a change of the group the workers compare what they hold. Items that no living worker has finished or
claimed are assigned again. Results that a worker lacks, or has unconfirmed, are sent by one worker that has
them. So all hold the same bits, even if an item was computed twice.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy
import torch
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import CollectiveError, ProtocolError, RunError
from barnraise.core.sanitize import printable
from barnraise.runs.commit import NO_MAP, MapKey
from barnraise.runs.map_schedule import WorkerLoad, assign_items, count_to_give_back
from barnraise.training.group.interface import GroupManager, TrainingCollectives
from barnraise.training.mapping.item_queue import LEFT, ItemFailure, ItemQueue
from barnraise.training.mapping.result_store import MAX_ITEMS, ResultStore, bits_of_bitmap
from barnraise.training.mapping.result_stream import MAX_PIECE, IncomingStream, OutgoingStream
from barnraise.training.recovery.failures import exit_without_state, raise_if_permanent

log = logging.getLogger("barnraise.training")

_ROUND_S = 0.1
_IDLE_ROUND_S = 0.03
_MOST_ROUND_S = 60.0
_MOST_WORDS = 600
_UNREADABLE = "a message of another worker about a map cannot be read"

Number = Annotated[int, Meta(ge=-1, le=1 << 50)]
Item = Annotated[int, Meta(ge=0, lt=MAX_ITEMS)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """The map that a worker is in; `NO_MAP` if it only follows the others."""

    key: MapKey
    total: Annotated[int, Meta(ge=0, le=MAX_ITEMS)] = 0
    fingerprint: Annotated[bytes, Meta(max_length=32)] = b""


class _Holding(msgspec.Struct, frozen=True, array_like=True):
    """The results that a worker has, as a bitmap, and the items that it is computing or will compute.

    ``confirmed``: the results that all workers of an earlier group have received.
    """

    results: Annotated[bytes, Meta(max_length=MAX_ITEMS // 8)]
    confirmed: Annotated[bytes, Meta(max_length=MAX_ITEMS // 8)]
    claims: Annotated[tuple[Item, ...], Meta(max_length=1 << 16)] = ()


class _Status(msgspec.Struct, frozen=True, array_like=True):
    """Report of a worker in one round; ``piece``: bytes of results that it sends after it."""

    newest_generation: Number
    held: Annotated[int, Meta(ge=0, le=MAX_ITEMS)] = 0  # items that it computes or will compute
    item_s: Seconds = 0.0
    busy_s: Seconds = 0.0
    round_s: Seconds = 0.0
    piece: Annotated[int, Meta(ge=0, le=MAX_PIECE)] = 0
    has_more: bool = False  # to send after this piece
    given_back: Annotated[tuple[Item, ...], Meta(max_length=1 << 16)] = ()
    takes_part: bool = True
    failed: tuple[Item, Annotated[str, Meta(max_length=_MOST_WORDS)]] | None = None


_hellos = msgspec.msgpack.Decoder(_Hello)
_holdings = msgspec.msgpack.Decoder(_Holding)
_statuses = msgspec.msgpack.Decoder(_Status)


class FailedItem(NamedTuple):
    """The item that ended a map, and the rank that computed it."""

    rank: int
    failure: ItemFailure


class MapExchange:
    """One worker's part in a map. `run` blocks until all workers have all results, or an item has failed.

    ``find_store`` returns the results of a map that this worker has finished or follows. ``regroup`` joins
    the next group.
    """

    def __init__(
        self,
        manager: GroupManager,
        key: MapKey,
        queue: ItemQueue,
        find_store: Callable[[MapKey, int, bytes], ResultStore],
        regroup: Callable[[CollectiveError | None], None],
    ) -> None:
        self.failed: FailedItem | None = None
        self.finished = 0  # items that are known to be finished
        self.on_round: Callable[[], None] = lambda: None
        self._manager, self._key, self._queue = manager, key, queue
        self._find_store, self._regroup = find_store, regroup
        self._round_s = _ROUND_S

    def run(self, total: int, fingerprint: bytes) -> None:
        """Take part until this worker's map is over, through any number of groups."""
        hello = _Hello(self._key, total, fingerprint)
        while True:
            try:
                if self._take_part(hello) == self._key:
                    return
            except CollectiveError as error:
                raise_if_permanent(error)
                log.info("the group failed during a map: %s", error.message)
                self._regroup(error)

    def follow(self) -> MapKey:
        """Follow the others in this group until the map that they are in is over. Return its key.

        Raise CollectiveError if the group fails, or when a newer one is known.
        """
        return self._take_part(_Hello(NO_MAP))

    def _take_part(self, own: _Hello) -> MapKey:
        """Take part in the map that is the furthest behind, until it is over. Return its key."""
        group = self._manager.group
        hellos = [decode(_hellos, message, _UNREADABLE) for message in _gather(group, own)]
        hello = min(hellos, key=lambda each: (each.key == NO_MAP, each.key))
        if hello.key == NO_MAP:
            return NO_MAP
        others = [other for other in hellos if other.key == hello.key]
        if any((other.total, other.fingerprint) != (hello.total, hello.fingerprint) for other in others):
            raise RunError(
                "the workers called run.map with different items",
                hint="Sort the items, and name files by paths that are the same on all machines.",
            )
        is_own = own.key == hello.key
        store = self._find_store(hello.key, hello.total, hello.fingerprint)
        rounds = _Rounds(self, store, is_own=is_own)
        rounds.run(group)
        return hello.key


class _Rounds:
    """The rounds of one map in one group. All ranks hold the same state, apart from ``_outgoing``."""

    def __init__(self, exchange: MapExchange, store: ResultStore, *, is_own: bool) -> None:
        self._exchange, self._store, self._is_own = exchange, store, is_own
        self._manager, self._queue = exchange._manager, exchange._queue
        self._outgoing = OutgoingStream(store.content)
        self._finished: set[int] = set()
        self._claims: list[set[int]] = []
        self._sources: dict[int, int] = {}  # the ranks that send the results that others lack, by item
        self._waiting: list[int] = []  # a heap of the items that no rank computes
        self._is_other_idle = False
        self._round_s = exchange._round_s

    def run(self, group: TrainingCollectives) -> None:
        self._compare_holdings(group)
        incoming = [IncomingStream() for _ in self._claims]
        received: list[int] = []
        started_at = time.monotonic()
        while True:
            status, piece = self._report()
            statuses = [decode(_statuses, message, _UNREADABLE) for message in _gather(group, status)]
            if self._has_failed(statuses):
                return
            self._store.confirm(received)  # a status follows what its rank has received
            if max(other.newest_generation for other in statuses) > self._manager.generation:
                raise CollectiveError("the group changes during a map")
            pieces = _exchange_pieces(group, piece, [other.piece for other in statuses])
            received = [
                item
                for rank, part in enumerate(pieces)
                for item, content in incoming[rank].feed(part)
                if self._accept(rank, item, content)
            ]
            if self._is_own:
                self._exchange.finished = len(self._finished)
                self._exchange.on_round()
            has_more = any(other.has_more for other in statuses)
            if len(self._finished) == self._store.total and not has_more:
                self._compare_results(group)
                self._store.confirm(self._finished)
                return
            is_waiting_for_work = self._assign(statuses)
            self._queue.wait(0.0 if has_more else _IDLE_ROUND_S if is_waiting_for_work else _ROUND_S)
            now = time.monotonic()
            self._round_s += (min(now - started_at, _MOST_ROUND_S) - self._round_s) * 0.3
            self._exchange._round_s, started_at = self._round_s, now

    def _compare_holdings(self, group: TrainingCollectives) -> None:
        """Compare what each rank has and computes; queue the results that this rank has to send."""
        self._queue_finished()
        claims = self._queue.claims() if self._is_own else ()
        own = _Holding(self._store.to_bitmap(), self._store.confirmed_bitmap(), claims)
        holdings = [decode(_holdings, message, _UNREADABLE) for message in _gather(group, own)]
        total = self._store.total
        held = numpy.stack([bits_of_bitmap(holding.results, total) for holding in holdings])
        manager = self._manager
        if manager.finished and not manager.is_first_start and not held.all(1).any():
            exit_without_state(finished=True)  # others have all results, and their script has ended
        confirmed = numpy.stack([bits_of_bitmap(holding.confirmed, total) for holding in holdings]) & held
        self._finished = set(numpy.flatnonzero(held.any(0)).tolist())
        self._claims = [set(holding.claims) - self._finished for holding in holdings]
        claimed = set().union(*self._claims)
        if any(item >= total for item in claimed):
            raise ProtocolError("a worker claims an item that the map does not have")
        self._waiting = [item for item in range(total) if item not in self._finished and item not in claimed]
        # The first rank with a confirmed result sends it, or else the first one with any.
        first = numpy.where(confirmed.any(0), confirmed.argmax(0), held.argmax(0))
        resent = numpy.flatnonzero(held.any(0) & ~confirmed.all(0))
        self._sources = dict(zip(resent.tolist(), first[resent].tolist(), strict=True))
        self._outgoing.add(item for item, source in self._sources.items() if source == group.rank)

    def _compare_results(self, group: TrainingCollectives) -> None:
        """Raise RunError if the ranks hold different bits, or ProtocolError if a result was not sent."""
        if not self._store.is_complete:
            raise ProtocolError("a worker has announced results of a map that it did not send")
        if len({bytes(message) for message in group.all_gather_bytes(self._store.digest())}) > 1:
            raise RunError(
                "workers hold different results of run.map", hint="One of them sent other bytes. Report this."
            )

    def _accept(self, rank: int, item: int, content: bytes) -> bool:
        """Keep a result if it comes from the right rank, and return True.

        Return False if another rank has sent it first. Raise ProtocolError if the rank was not to compute it.
        """
        if self._sources.get(item) != rank and item not in self._claims[rank]:
            if item in self._finished:
                return False
            raise ProtocolError(f"a worker sent the result of item {item}, which was not assigned to it")
        self._store.replace(item, content)
        self._finished.add(item)
        for claims in self._claims:
            claims.discard(item)
        return True

    def _queue_finished(self) -> list[int]:
        return self._queue.take_finished() if self._is_own else []

    def _report(self) -> tuple[_Status, bytes]:
        """Return this worker's report and the piece of results that follows it."""
        newest = self._manager.newest_generation()
        if not self._is_own:
            piece = self._outgoing.take()
            has_more = not self._outgoing.is_empty
            return _Status(newest, piece=len(piece), has_more=has_more, takes_part=False), piece
        if self._queue.is_closed:
            raise CollectiveError(LEFT)
        load = self._queue.load()
        claims = self._claims[self._manager.group.rank]
        self._outgoing.add(item for item in self._queue_finished() if item in claims)
        piece = self._outgoing.take()
        given_back = self._queue.give_back(
            count_to_give_back(
                load, is_other_idle=self._is_other_idle, waiting=len(self._waiting), round_s=self._round_s
            )
        )
        failure = self._queue.failure
        status = _Status(
            newest,
            load.held - len(given_back),
            load.item_s,
            load.busy_s,
            self._round_s,
            len(piece),
            not self._outgoing.is_empty,
            given_back,
            failed=(failure.item, printable(failure.sentence)[:_MOST_WORDS]) if failure else None,
        )
        return status, piece

    def _has_failed(self, statuses: Sequence[_Status]) -> bool:
        """Note the first item that failed on any rank; all ranks note the same one."""
        failures = [
            FailedItem(rank, ItemFailure(status.failed[0], printable(status.failed[1])))
            for rank, status in enumerate(statuses)
            if status.failed is not None
        ]
        if failures and self._is_own:
            self._exchange.failed = min(failures, key=lambda failed: failed.failure.item)
        return bool(failures)

    def _assign(self, statuses: Sequence[_Status]) -> bool:
        """Assign the items that no rank computes. Return True if a rank has nothing to do."""
        for rank, status in enumerate(statuses):
            for item in status.given_back:
                if item in self._claims[rank]:
                    self._claims[rank].discard(item)
                    heapq.heappush(self._waiting, item)
        loads = [
            WorkerLoad(status.held, status.item_s, status.busy_s, status.takes_part) for status in statuses
        ]
        round_s = max(_ROUND_S, *(status.round_s for status in statuses))
        ranks = assign_items(len(self._waiting), loads, round_s)
        own: list[int] = []
        for rank in ranks:
            item = heapq.heappop(self._waiting)
            self._claims[rank].add(item)
            if rank == self._manager.group.rank:
                own.append(item)
        if own:
            self._queue.put(own)
        self._is_other_idle = any(
            load.takes_part and not load.held and rank not in ranks for rank, load in enumerate(loads)
        )
        will_be_idle = any(
            load.takes_part and load.held <= 1 and max(load.item_s, load.busy_s) < _ROUND_S for load in loads
        )
        return bool(self._waiting) and (self._is_other_idle or will_be_idle)


def _gather(group: TrainingCollectives, message: msgspec.Struct) -> list[bytes]:
    return group.all_gather_bytes(msgspec.msgpack.encode(message))


def _exchange_pieces(group: TrainingCollectives, own: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Send this rank's piece to all other ranks, and return the pieces of all ranks."""
    rank = group.rank
    works = []
    if own:
        tensor = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        works += [group.send_async(tensor, to) for to in range(len(sizes)) if to != rank]
    received = {
        sender: torch.empty(size, dtype=torch.uint8)
        for sender, size in enumerate(sizes)
        if size and sender != rank
    }
    works += [group.receive_async(tensor, sender) for sender, tensor in received.items()]
    for work in works:
        work.wait()
    received_bytes = {sender: tensor.numpy().tobytes() for sender, tensor in received.items()}
    return [own if sender == rank else received_bytes.get(sender, b"") for sender in range(len(sizes))]
