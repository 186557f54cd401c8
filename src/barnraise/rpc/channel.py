"""Channel to one other worker: packets as point-to-point messages of a group of two ranks.

A thread sends in order, another one receives. Each waits for bytes only, never for a function of the script.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch

from barnraise.collectives.c10d.operations import OpenedGroup
from barnraise.collectives.ops import operation
from barnraise.collectives.work import BarnraiseWork
from barnraise.core.errors import CollectiveError, OperationTimeout, PeerLost, ProtocolError
from barnraise.rpc.messages import FRAME_BYTES, read_sizes

log = logging.getLogger("barnraise.rpc")

MAX_QUEUED_BYTES = 2 << 30
_PIECE_BYTES = 4 << 20
_WINDOW = 4  # pieces under way
_PIECE_S = 600.0  # a slow link takes minutes for a piece; a dead one is noticed by its heartbeats
_LISTEN_S = 10 * 365 * 86400.0  # a worker may be silent for days: the heartbeats of its link end the wait
_JOIN_S = 2.0
_FRAME_TAG, _REST_TAG = 1, 2

Receive = Callable[[int, memoryview, memoryview], None]
Lose = Callable[[int, CollectiveError], None]


class PeerChannel:
    """Channel to the worker of another rank.

    ``receive`` gets rank, head and body of each message. ``lose`` gets the rank and the error when the
    channel fails, once. A channel that this worker closes does not fail.
    """

    def __init__(self, rank: int, pair: OpenedGroup, receive: Receive, lose: Lose) -> None:
        self._rank, self._pair = rank, pair
        self._submitter = pair.submitter
        self._receive, self._lose = receive, lose
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._is_over = False
        self._threads = [
            threading.Thread(target=target, name=f"barnraise-rpc-{name}-{rank}", daemon=True)
            for name, target in (("send", self._send_all), ("receive", self._receive_all))
        ]

    def start(self) -> None:
        """Start to send and to receive."""
        for thread in self._threads:
            thread.start()

    def send(self, packet: bytearray, *, always: bool = False) -> bool:
        """Queue a packet for sending. Return False if too many bytes wait, unless it is sent ``always``."""
        with self._lock:
            if self._is_over:
                return True  # what waits for an answer has failed already
            if not always and self._queued_bytes and self._queued_bytes + len(packet) > MAX_QUEUED_BYTES:
                return False
            self._queued_bytes += len(packet)
        self._outbox.put(packet)
        return True

    def close(self, flush_s: float) -> None:
        """Close the channel, after up to ``flush_s`` seconds for packets that wait."""
        sender, receiver = self._threads
        self._outbox.put(None)
        _join(sender, flush_s)
        with self._lock:
            self._is_over = True
        self._close_group()
        _join(sender, _JOIN_S)
        _join(receiver, _JOIN_S)

    def _close_group(self) -> None:
        self._submitter.comm_process.close_group(self._submitter.group)

    def _fail(self, error: CollectiveError) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._outbox.put(None)  # ends the sending thread
        self._close_group()
        self._lose(self._rank, self._named(error))

    def _named(self, error: CollectiveError) -> CollectiveError:
        """Return the error with the rank of all workers, in place of the rank in the pair."""
        if isinstance(error, PeerLost):
            is_own = error.peer == self._pair.rank
            why = f"its link to this worker failed: {error.why}" if is_own else error.why
            return PeerLost(self._rank, why)
        if isinstance(error, OperationTimeout):
            return PeerLost(self._rank, f"it took no message for {_PIECE_S:g} s")
        return error

    # sending

    def _send_all(self) -> None:
        while (packet := self._outbox.get()) is not None:
            try:
                self._transmit(packet)
            except CollectiveError as error:
                self._fail(error)
                return
            with self._lock:
                self._queued_bytes -= len(packet)
            del packet  # or it would live until the next one

    def _transmit(self, packet: bytearray) -> None:
        data = torch.frombuffer(packet, dtype=torch.uint8)
        works: deque[BarnraiseWork] = deque()
        for start, end in _pieces(len(packet)):
            if len(works) == _WINDOW:
                works.popleft().wait()
            works.append(self._submit(operation.send(data[start:end]), start, _PIECE_S))
        for work in works:
            work.wait()

    # receiving

    def _receive_all(self) -> None:
        try:
            while True:
                self._receive(self._rank, *self._next())
        except CollectiveError as error:
            self._fail(error)
        except ProtocolError as error:
            self._fail(PeerLost(self._rank, error.message))
        except Exception as error:
            log.exception("a message of rank %d could not be handled", self._rank)
            self._fail(PeerLost(self._rank, f"its message could not be handled: {error!r}"))

    def _next(self) -> tuple[memoryview, memoryview]:
        """Return head and body of the next message."""
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        self._submit(operation.receive(frame), 0, _LISTEN_S).wait()
        sizes = read_sizes(memoryview(frame.numpy()))
        packet = frame
        if sizes.total > FRAME_BYTES:
            packet = torch.empty(sizes.total, dtype=torch.uint8)
            packet[:FRAME_BYTES] = frame
            works: deque[BarnraiseWork] = deque()
            for start, end in _pieces(sizes.total):
                if not start:
                    continue
                if len(works) == _WINDOW:
                    works.popleft().wait()
                works.append(self._submit(operation.receive(packet[start:end]), start, _PIECE_S))
            for work in works:
                work.wait()
        return sizes.split(memoryview(packet.numpy()))

    def _submit(self, call: operation.Operation, start: int, timeout_s: float) -> BarnraiseWork:
        tag = _REST_TAG if start else _FRAME_TAG
        return self._submitter.submit_point_to_point(call, 1 - self._pair.rank, tag, timeout_s)


def _pieces(total: int) -> Iterator[tuple[int, int]]:
    """Cut a packet into its first frame and pieces of the rest."""
    yield 0, FRAME_BYTES
    for start in range(FRAME_BYTES, total, _PIECE_BYTES):
        yield start, min(start + _PIECE_BYTES, total)


def _join(thread: threading.Thread, timeout_s: float) -> None:
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(timeout_s)
