"""Client of the cluster's key-value store: blocking, thread-safe, with deadlines.

Each call goes to this machine's agent. A lost connection is opened again. The same write is repeated under
the same number until its deadline, so it happens once or is reported as unknown.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from barnraise.agent_client import kv_messages as messages
from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.kv_messages import (
    LARGEST_KEY,
    LARGEST_VALUE,
    ClusterRequest,
    ClusterResponse,
    KvDenied,
    KvDone,
    KvRequest,
    KvResponse,
    Namespace,
    decode_response,
    encode,
)
from barnraise.core.errors import AgentError, ListenerError, MembershipError, OperationTimeout, ProtocolError
from barnraise.core.units import format_size

_SLICE_S = 10.0  # of a long wait: an agent that was replaced meanwhile is noticed
_MARGIN_S = 5.0
_PAUSE_S = 0.2
_LOOK_S = 0.2
_LAST_LOOK_S = 2.0
_ASK_BYTES = 512 << 10
_MOST_NAMED = 5


class KvRequester(Protocol):
    """Connection to the agent. Errors whose cause is an OSError mean that no agent was there."""

    def ask(self, question: bytes, timeout: float) -> bytes: ...

    def close(self) -> None: ...


Connect = Callable[[], KvRequester]
_Kind = Callable[..., messages.Operation | messages.WatchKey]


def agent_at(state_dir: Path) -> Connect:
    """Return a function that connects to the agent of this state directory."""
    return lambda: ListenerClient.connect(state_dir)


def ask_cluster(connect: Connect, timeout_s: float = 5.0) -> ClusterResponse:
    """Return how many machines take work. Raise AgentError or ListenerError if no agent answers here."""
    asker = connect()
    try:
        answer = decode_response(asker.ask(encode(ClusterRequest()), timeout_s))
    finally:
        asker.close()
    if not isinstance(answer, ClusterResponse):
        raise ProtocolError(f"the agent answered {type(answer).__name__} instead of telling of the cluster")
    return answer


class _Lane:
    """One question at a time. Its writes are numbered, so the agents know a repeated one."""

    __slots__ = ("asker", "client", "serial")

    def __init__(self) -> None:
        self.asker: KvRequester | None = None
        self.client = os.urandom(16)
        self.serial = 0

    def close(self) -> None:
        asker, self.asker = self.asker, None
        if asker is not None:
            asker.close()


class KvClient:
    """One scope of the store. ``timeout_s`` bounds every call that is given no time of its own.

    ``durable``: use the store on the disks instead of the one in memory.
    """

    def __init__(
        self, connect: Connect, scope: Namespace, timeout_s: float = 60.0, *, durable: bool = False
    ) -> None:
        self.scope = scope
        self.timeout_s = timeout_s
        self._durable = durable
        self.number = 0  # of the newest operation that was answered here
        self._connect = connect
        self._founding = b""
        self._lock = threading.Lock()
        self._free: list[_Lane] = []
        self._pid = os.getpid()

    def close(self) -> None:
        """Close the idle connections; the client may be used again."""
        with self._lock:
            lanes, self._free = self._free, []
        for lane in lanes:
            lane.close()

    def __del__(self) -> None:
        if hasattr(self, "_free"):
            self.close()

    # writes

    def set(self, key: str, value: bytes, timeout_s: float | None = None) -> None:
        _check(key, value)
        self._do(messages.SetKey, (key, value), f"set {key!r}", timeout_s)

    def add(self, key: str, amount: int, timeout_s: float | None = None) -> int:
        _check(key)
        return self._do(messages.AddToKey, (key, amount), f"add to {key!r}", timeout_s).count

    def compare_set(self, key: str, expected: bytes, desired: bytes, timeout_s: float | None = None) -> bytes:
        """Set a key if it has the expected value, and return its value now. ``expected`` may be empty for a
        missing key.
        """
        _check(key, expected + desired)
        done = self._do(messages.CompareAndSet, (key, expected, desired), f"set {key!r}", timeout_s)
        return done.value or b""

    def append(self, key: str, value: bytes, timeout_s: float | None = None) -> None:
        _check(key, value)
        self._do(messages.AppendToKey, (key, value), f"append to {key!r}", timeout_s)

    def delete(self, key: str, timeout_s: float | None = None) -> bool:
        """Delete a key; return True if it existed."""
        _check(key)
        return self._do(messages.DeleteKey, (key,), f"delete {key!r}", timeout_s).count > 0

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes], timeout_s: float | None = None) -> None:
        """Set all keys, but not atomically if they are too large for one message."""
        if len(keys) != len(values):
            raise AgentError(
                f"{len(keys)} keys come with {len(values)} values", hint="Give each key a value."
            )
        sizes = [_check(key, value) for key, value in zip(keys, values, strict=True)]
        deadline = self._deadline(timeout_s)
        for start, end in _parts(sizes):
            fields = (tuple(keys[start:end]), tuple(values[start:end]))
            left = max(0.0, deadline - time.monotonic())
            self._do(messages.SetKeys, fields, f"set {_some(keys[start:end])}", left)

    def push(self, key: str, value: bytes, timeout_s: float | None = None) -> int:
        """Append a value to a queue, and return the new length of the queue."""
        _check(key, value)
        return self._do(messages.PushToQueue, (key, value), f"push to {key!r}", timeout_s).count

    def pop(self, key: str, timeout_s: float | None = None) -> bytes | None:
        """Remove and return the first value of the queue; None if it is empty."""
        _check(key)
        return self._do(messages.PopFromQueue, (key,), f"pop from {key!r}", timeout_s).value

    def drop(self, timeout_s: float | None = None) -> None:
        """Delete the namespace: its generation is over on all machines."""
        self._do(messages.DropNamespace, (), f"drop {self.scope}", timeout_s)

    # reads

    def get(self, key: str, timeout_s: float | None = None) -> bytes | None:
        """Return the value without waiting; None if there is none."""
        _check(key)
        return self._do(messages.GetKey, (key,), f"get {key!r}", timeout_s).value

    def missing(self, keys: Sequence[str], timeout_s: float | None = None) -> tuple[str, ...]:
        """Return the keys that are missing now, or the first of them if they are many."""
        for start, end in _parts([_check(key) for key in keys]):
            some = tuple(keys[start:end])
            done = self._do(messages.CheckKeys, (some,), f"look for {_some(some)}", timeout_s)
            if done.missing:
                return done.missing
        return ()

    def count(self, timeout_s: float | None = None) -> int:
        """Return the number of keys, without queues."""
        return self._do(messages.CountResult, (), "count the keys", timeout_s).count

    def length(self, key: str, timeout_s: float | None = None) -> int:
        """Return the number of values in a queue."""
        _check(key)
        return self._do(messages.QueueLength, (key,), f"measure {key!r}", timeout_s).count

    def read_queue(
        self, key: str, start: int, timeout_s: float | None = None
    ) -> tuple[tuple[bytes, ...], int]:
        """Return values of a queue from place ``start`` on, and the length of the queue.

        Only as many values are returned as fit into one answer.
        """
        _check(key)
        done = self._do(messages.ReadQueue, (key, start), f"read {key!r}", timeout_s)
        return done.values, done.count

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Return once all keys are there; OperationTimeout names those that are not."""
        self._wait(keys, timeout_s, fetch=False)

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """Return the values once all keys exist. Raise OperationTimeout with the missing keys."""
        return self._wait(keys, timeout_s, fetch=True)

    def _wait(self, keys: Sequence[str], timeout_s: float | None, *, fetch: bool) -> list[bytes]:
        deadline = self._deadline(timeout_s)
        values: list[bytes] = []
        for start, end in _parts([_check(key) for key in keys]):
            place = start
            while place < end:
                done = self._watch(tuple(keys[place:end]), fetch=fetch, deadline=deadline)
                values += done.values
                # A long answer comes in pieces.
                place = place + len(done.values) if fetch else end
        return values

    def _watch(self, keys: tuple[str, ...], *, fetch: bool, deadline: float) -> KvDone:
        """Wait until all keys exist. At the deadline, look once more to name the missing ones."""
        given, what = max(0.0, deadline - time.monotonic()), f"wait for {_some(keys)}"
        while True:
            left = deadline - time.monotonic()
            if left > _LOOK_S:
                done = self._do(messages.WatchKey, (keys, fetch), what, left)
            else:
                done = self._do(
                    messages.GetKeys if fetch else messages.CheckKeys, (keys,), what, _LAST_LOOK_S
                )
            if not done.missing:
                return done
            if left <= _LOOK_S:
                raise OperationTimeout(
                    f"{_some(done.missing)} did not appear in {self.scope} within {given:.1f} s",
                    hint="Start the processes that should set them, or wait longer.",
                )

    # asking

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    def _do(
        self,
        kind: _Kind,
        fields: tuple[object, ...],
        what: str,
        timeout_s: float | None,
    ) -> KvDone:
        """Ask until there is an answer; raise what was denied."""
        deadline = self._deadline(timeout_s)
        if self._durable:
            what = f"use journal {self.scope.run!r}"
        with self._lane() as lane:
            lane.serial += 1
            operation = kind(self.scope, lane.client, lane.serial, self._founding, *fields)
            while True:
                patience = max(0.0, min(deadline - time.monotonic(), _SLICE_S))
                result = self._ask(lane, KvRequest(operation, patience, self._durable))
                if isinstance(result, KvDone):
                    with self._lock:
                        self._founding = result.founding
                        self.number = max(self.number, result.number)
                    return result
                if isinstance(result, KvDenied) and result.reason != "late":
                    raise AgentError(result.message, hint=result.hint)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise MembershipError(f"could not {what} in time: {result.message}", hint=result.hint)
                time.sleep(min(_PAUSE_S, left))

    def _ask(self, lane: _Lane, question: KvRequest) -> KvDone | KvDenied | ListenerError | AgentError:
        """Return the result, or the error if no agent was there; a refusal of an agent is final."""
        try:
            if lane.asker is None:
                lane.asker = self._connect()
            answer = decode_response(lane.asker.ask(encode(question), question.patience_s + _MARGIN_S))
        except (ListenerError, AgentError) as error:
            lane.close()
            if not isinstance(error.__cause__, OSError):
                raise
            return error
        except BaseException:
            lane.close()  # an answer that comes late must not be taken for the next one's
            raise
        if not isinstance(answer, KvResponse):
            lane.close()
            raise ProtocolError(f"the agent answered {type(answer).__name__} to a request to the store")
        return answer.result

    @contextmanager
    def _lane(self) -> Iterator[_Lane]:
        if self._pid != os.getpid():  # after a fork the connections, and perhaps the lock, are the parent's
            self._pid, self._free, self._lock = os.getpid(), [], threading.Lock()
        with self._lock:
            lane = self._free.pop() if self._free else _Lane()
        try:
            yield lane
        finally:
            with self._lock:
                self._free.append(lane)


def _check(key: str, value: bytes = b"") -> int:
    """Return the bytes of key and value. Raise AgentError if they are too many."""
    try:
        length = len(key.encode())
    except UnicodeEncodeError as error:
        raise AgentError(f"the key {key!r} is not valid text", hint="Use another key.") from error
    if length > LARGEST_KEY:
        raise AgentError(f"a key has {length} bytes; it may have {LARGEST_KEY}", hint="Use a shorter key.")
    if len(value) > LARGEST_VALUE:
        raise AgentError(
            f"key {key!r} has {format_size(len(value))}; the store accepts {format_size(LARGEST_VALUE)}",
            hint="Send large data with a collective instead of the store.",
        )
    return length + len(value)


def _parts(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges that each fit into one request."""
    start, size = 0, 0
    for place, item_size in enumerate(sizes):
        if place > start and size + item_size + 16 > _ASK_BYTES:
            yield start, place
            start, size = place, 0
        size += item_size + 16
    if sizes:
        yield start, len(sizes)


def _some(keys: Sequence[str]) -> str:
    named = ", ".join(repr(key) for key in keys[:_MOST_NAMED])
    return f"{named} and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else named
