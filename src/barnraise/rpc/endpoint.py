"""Endpoint of one worker: makes calls, answers those of others, and keeps the leases of references.

Channels carry its messages, in order for each pair of workers. No lock is held while a function of the script
runs or a message is sent.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

from barnraise.core.errors import (
    BarnraiseError,
    CollectiveError,
    OperationAborted,
    ProtocolError,
    RpcError,
    RunError,
)
from barnraise.core.sanitize import printable
from barnraise.rpc.arguments import decode_arguments, decode_result, encode_arguments, encode_result
from barnraise.rpc.call_pool import CallPool
from barnraise.rpc.messages import (
    FRAME_BYTES,
    MAX_TEXT,
    MAX_TIMEOUT_S,
    CallMessage,
    ErrorMessage,
    FetchMessage,
    GoodbyeMessage,
    LeaseMessage,
    Message,
    ReferenceId,
    ReleaseMessage,
    ResultMessage,
    decode_message,
    encode_packet,
    read_sizes,
)
from barnraise.rpc.owned_objects import OwnedObjects
from barnraise.rpc.pending_results import PendingResults
from barnraise.rpc.references import DEFAULT_TIMEOUT_S, RemoteReference, pin_all
from barnraise.rpc.registry import MAX_NAME, FunctionRegistry
from barnraise.worker.launch.serializer import Content

log = logging.getLogger("barnraise.rpc")

_CLOSE_S = 5.0
_STOPPED = "remote calls were stopped on this worker"


class MessageChannel(Protocol):
    """Channel to one worker. ``send`` returns False if too many bytes wait already."""

    def send(self, packet: bytearray, *, always: bool = False) -> bool: ...

    def close(self, flush_s: float) -> None: ...


class _Lending(NamedTuple):
    """A lease that this worker requested for another rank."""

    identity: ReferenceId
    holder: int


class RpcEndpoint:
    """Remote calls of one worker, to and from all others. Thread-safe."""

    def __init__(self, rank: int, world: int, registry: FunctionRegistry, threads: int = 16) -> None:
        self.rank, self.world = rank, world
        self._registry = registry
        self._pool = CallPool(threads)
        self._channels: dict[int, MessageChannel] = {rank: _Loopback(self)}
        self._objects = OwnedObjects()
        # Destructors may put into this queue anywhere, because it takes no lock of ours.
        self._drops: queue.SimpleQueue[ReferenceId | threading.Event | None] = queue.SimpleQueue()
        self._pending = PendingResults(lambda: self._drops.put(None))
        self._state = threading.Condition()
        self._lost: dict[int, BarnraiseError] = {}
        self._departed: set[int] = set()
        self._lendings: dict[int, _Lending] = {}
        self._held: Counter[ReferenceId] = Counter()
        self._counts: Counter[str] = Counter()
        self._is_stopping = self._is_stopped = False

    def start(self, channels: Mapping[int, MessageChannel]) -> None:
        """Use these channels to the other workers. Messages may arrive from now on."""
        self._channels.update(channels)
        threading.Thread(target=self._keep_time, name="barnraise-rpc-timer", daemon=True).start()

    # calls of this worker

    def call(
        self,
        to: int,
        function: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout_s: float,
        *,
        keeps: bool = False,
    ) -> Future[Any]:
        """Call a function on a rank. Return the future of its result.

        ``keeps``: the result stays there, and the future has a reference to it.
        """
        self._check(to, timeout_s)
        arguments = encode_arguments(function, args, kwargs)
        references = list(arguments.references.values())
        pin_all(references)
        number, future = self._pending.begin(to, function, timeout_s)
        deadline = time.monotonic() + timeout_s
        self._count("calls")

        def post() -> BarnraiseError | None:
            places = tuple((place, held.identity) for place, held in arguments.references.items())
            left_s = max(0.0, deadline - time.monotonic())
            message = CallMessage(number, function, len(args), arguments.names, places, keeps, left_s)
            return self._post(to, message, arguments.contents)

        failed = partial(self._pending.fail, number, to)
        self._lend(references, to, timeout_s, post, failed)
        return future

    def reference(self, value: Any) -> RemoteReference:
        """Return a reference to an object of this worker."""
        self._check(self.rank, DEFAULT_TIMEOUT_S)
        serial = self._objects.keep(value, self.rank)
        assert serial is not None  # this rank is not lost
        return self._hold(ReferenceId(self.rank, serial))

    def fetch(self, reference: RemoteReference, timeout_s: float) -> Any:
        """Return the object of a reference, or a copy if another worker has it."""
        owner, serial = reference.owner, reference.identity.serial
        self._check(owner, timeout_s)
        if owner == self.rank:
            return self._objects.get(serial, self.rank)
        number, future = self._pending.begin(owner, "fetch", timeout_s)
        error = self._post(owner, FetchMessage(number, serial))
        if error is not None:
            self._pending.fail(number, owner, error)
        return future.result()

    def drop(self, identity: ReferenceId) -> None:
        """Release one lease, soon and without waiting. A destructor may call it."""
        self._drops.put(identity)

    def statistics(self) -> dict[str, int]:
        """Return counters of calls, and of references that are held now."""
        objects, leases = self._objects.counts(self.rank)
        with self._state:
            references = self._held.total()
        names = ("calls", "served", "failed", "expired", "leaked")
        return {name: self._counts[name] for name in names} | {
            "pending": len(self._pending),
            "objects": objects,
            "leases": leases,
            "references": references,
        }

    def stop(self, timeout_s: float) -> tuple[int, ...]:
        """Wait until no worker makes calls any more, then close. Return the ranks that were late.

        This worker answers calls until then. References that are still held are released and count as leaked.
        """
        deadline = time.monotonic() + timeout_s
        with self._state:
            self._is_stopping = True
        self._pending.wait_empty(timeout_s)
        self._release_all()
        for rank in self._others():
            self._post(rank, GoodbyeMessage())
        with self._state:
            self._state.wait_for(lambda: not self._late_ranks(), max(0.0, deadline - time.monotonic()))
            late = self._late_ranks()
        self._pool.wait_idle(max(0.0, deadline - time.monotonic()))
        self.close(_CLOSE_S)
        return late

    def close(self, flush_s: float) -> None:
        """Close all channels at once. What waits to be sent gets ``flush_s`` seconds."""
        with self._state:
            if self._is_stopped:
                return
            self._is_stopping = self._is_stopped = True
        self._pool.clear()
        for channel in self._channels.values():
            channel.close(flush_s)
        self._pending.fail_all(OperationAborted(_STOPPED, hint="Call rpc.start() to continue."))
        self._pool.wait_idle(_CLOSE_S)  # a thread inside of torch would crash the interpreter at its end
        self._drops.put(None)
        self._objects.clear()

    # events of the channels

    def receive(self, sender: int, head: bytes | memoryview, body: bytes | memoryview) -> None:
        """Handle a message of a rank. Raise ProtocolError if the rank breaks the protocol."""
        message = decode_message(head)
        match message:
            case CallMessage():
                self._receive_call(sender, message, body)
            case FetchMessage():
                self._queue(sender, message.call, 0, partial(self._answer_fetch, sender, message))
            case LeaseMessage():
                self._answer_lease(sender, message)
            case ReleaseMessage():
                self._objects.release(message.serial, message.holder)
            case ResultMessage():
                self._receive_result(sender, message, body)
            case ErrorMessage():
                self._receive_error(sender, message)
            case GoodbyeMessage():
                with self._state:
                    self._departed.add(sender)
                    self._state.notify_all()

    def lose(self, rank: int, error: CollectiveError) -> None:
        """Fail what waits for a rank, and release its leases. Its channel calls this once."""
        with self._state:
            if self._is_stopped or rank in self._lost:
                return
            self._lost[rank] = error
            self._lendings = {
                number: lending
                for number, lending in self._lendings.items()
                if lending.identity.owner != rank
            }
            is_expected = self._is_stopping  # the others close their channels, too
            self._state.notify_all()
        log.log(
            logging.DEBUG if is_expected else logging.WARNING,
            "remote calls to rank %d are over: %s",
            rank,
            error.message,
        )
        self._pending.fail_rank(rank, error)
        self._objects.lose(rank)

    # answers

    def _receive_call(self, sender: int, message: CallMessage, body: bytes | memoryview) -> None:
        # First of all: the references have leases, which must be released even if the call is refused.
        try:
            references = [self._adopt(identity) for _, identity in message.references]
        except RunError as error:
            self._answer_error(sender, message.call, error)
            return
        received_at = time.monotonic()
        answer = partial(self._answer_call, sender, message, body, references, received_at)
        self._queue(sender, message.call, len(body), answer)

    def _queue(self, sender: int, number: int, nbytes: int, answer: Callable[[], None]) -> None:
        refusal = self._pool.submit(nbytes, answer)
        if refusal is not None:
            hint = "Wait for earlier futures before further calls."
            self._answer_error(
                sender, number, RunError(f"rank {self.rank} is overloaded: {refusal}", hint=hint)
            )

    def _answer_call(
        self,
        caller: int,
        message: CallMessage,
        body: bytes | memoryview,
        references: list[RemoteReference],
        received_at: float,
    ) -> None:
        if time.monotonic() - received_at >= message.timeout_s:
            self._count("expired")  # the caller does not wait any more
            return
        name = message.function
        try:
            function = self._registry.get(name)
            if function is None:
                known = ", ".join(self._registry.names[:20]) or "none"
                raise LookupError(f"no function is registered under this name; registered: {known}")
            args, kwargs = decode_arguments(message, body, references)
            value = function(*args, **kwargs)
        except BaseException as error:  # also sys.exit: it must not leave the caller waiting
            self._count("failed")
            log.warning("%s, called by rank %d, failed", printable(name), caller, exc_info=True)
            self._answer_error(caller, message.call, error)
            return
        self._count("served")
        self._answer_value(caller, message, value)

    def _answer_value(self, caller: int, message: CallMessage, value: Any) -> None:
        if isinstance(value, RemoteReference):
            self._answer_reference(caller, message, value)
        elif message.keeps:
            serial = self._objects.keep(value, caller)
            if serial is not None:
                self._post(caller, ResultMessage(message.call, ReferenceId(self.rank, serial)))
                if caller == self.rank:  # the receiver has taken a lease of its own
                    self._objects.release(serial, caller)
        else:
            self._answer_bytes(caller, message.call, message.function, value)

    def _answer_reference(self, caller: int, message: CallMessage, reference: RemoteReference) -> None:
        post = partial(self._post, caller, ResultMessage(message.call, reference.identity))
        failed = partial(self._answer_error, caller, message.call)
        try:
            reference.pin()
        except RunError as error:  # it was released here
            failed(error)
            return
        self._lend([reference], caller, DEFAULT_TIMEOUT_S, post, failed)

    def _answer_fetch(self, caller: int, message: FetchMessage) -> None:
        try:
            value = self._objects.get(message.serial, caller)
        except LookupError as error:
            self._answer_error(caller, message.call, error)
            return
        self._answer_bytes(caller, message.call, "fetch", value)

    def _answer_bytes(self, caller: int, number: int, name: str, value: Any) -> None:
        failure: Exception | None
        try:
            failure = self._post(caller, ResultMessage(number), encode_result(name, value))
        except Exception as error:  # noqa: BLE001  # of any kind: the caller waits for an answer
            failure = error
        if failure is not None:
            self._answer_error(caller, number, failure)

    def _answer_lease(self, sender: int, message: LeaseMessage) -> None:
        if message.holder >= self.world or message.holder == self.rank:
            raise ProtocolError(f"a lease for rank {message.holder}, which cannot be lent")
        refusal = (
            self._objects.lend(message.serial, message.holder)
            if self._objects.holds(message.serial, sender)
            else f"rank {sender} holds no reference to this object"
        )
        if refusal is None:
            self._post(sender, ResultMessage(message.call))
        else:
            self._answer_error(sender, message.call, RunError(refusal))

    def _answer_error(self, caller: int, number: int, error: BaseException) -> None:
        text = error.message if isinstance(error, BarnraiseError) else str(error)
        kind = printable(type(error).__name__)[:MAX_NAME]
        self._post(caller, ErrorMessage(number, kind, printable(text, instead=" ", limit=MAX_TEXT)))

    # results

    def _receive_result(self, sender: int, message: ResultMessage, body: bytes | memoryview) -> None:
        reference: RemoteReference | None = None
        failure: BarnraiseError | None = None
        value: Any = None
        try:
            if message.reference is not None:
                reference = self._adopt(message.reference)
            else:
                value = decode_result(body)
        except (RunError, ProtocolError) as error:
            failure = error
        lending = self._take_lending(sender, message.call)
        pending = self._pending.take(message.call, sender)
        if pending is None:  # it comes too late: what it brings is given back
            if lending is not None:
                self._return_lease(lending.identity, lending.holder)
            if reference is not None:
                reference.release()
        elif failure is not None:
            pending.fail(failure)
        else:
            pending.future.set_result(value if reference is None else reference)

    def _receive_error(self, sender: int, message: ErrorMessage) -> None:
        self._take_lending(sender, message.call)
        pending = self._pending.take(message.call, sender)
        if pending is not None:
            kind, text = printable(message.kind), printable(message.text, instead=" ")
            pending.fail(RpcError(sender, pending.what, kind, text))

    # references

    def _lend(
        self,
        references: Sequence[RemoteReference],
        to: int,
        timeout_s: float,
        post: Callable[[], BarnraiseError | None],
        failed: Callable[[BarnraiseError], None],
    ) -> None:
        """Get a lease for a rank on each pinned reference, then post a message with them, and unpin them.

        If that fails, return the leases and call ``failed``. An owner that gets its own reference takes a
        lease when that arrives.
        """
        foreign = [reference for reference in references if reference.owner not in (to, self.rank)]
        own = [reference.identity for reference in references if reference.owner == self.rank != to]
        lent: list[ReferenceId] = []

        def finish(error: BarnraiseError | None) -> None:
            for identity in own if error is None else ():
                refusal = self._objects.lend(identity.serial, to)
                if refusal is not None:
                    error = RunError(f"a reference cannot be sent to rank {to}: {refusal}")
                    break
                lent.append(identity)
            error = post() if error is None else error
            if error is not None:
                for identity in lent:
                    self._return_lease(identity, to)
                failed(error)
            for reference in references:
                reference.unpin()

        if not foreign:
            finish(None)
            return
        left = [len(foreign)]
        failures: list[BarnraiseError] = []

        def answered(reference: RemoteReference, future: Future[Any]) -> None:
            error = future.exception()
            with self._state:
                if isinstance(error, BarnraiseError):
                    failures.append(error)
                else:
                    lent.append(reference.identity)
                left[0] -= 1
                is_last = not left[0]
            if is_last:
                finish(failures[0] if failures else None)

        for reference in foreign:
            future = self._ask_for_lease(reference.identity, to, timeout_s)
            future.add_done_callback(partial(answered, reference))

    def _ask_for_lease(self, identity: ReferenceId, holder: int, timeout_s: float) -> Future[Any]:
        what = f"a lease for rank {holder}"
        number, future = self._pending.begin(identity.owner, what, timeout_s)
        with self._state:
            self._lendings[number] = _Lending(identity, holder)
        error = self._post(identity.owner, LeaseMessage(number, identity.serial, holder))
        if error is not None:
            self._take_lending(identity.owner, number)
            self._pending.fail(number, identity.owner, error)
        return future

    def _take_lending(self, owner: int, number: int) -> _Lending | None:
        with self._state:
            lending = self._lendings.get(number)
            if lending is None or lending.identity.owner != owner:
                return None
            return self._lendings.pop(number)

    def _return_lease(self, identity: ReferenceId, holder: int) -> None:
        if identity.owner == self.rank:
            self._objects.release(identity.serial, holder)
        else:
            self._post(identity.owner, ReleaseMessage(identity.serial, holder))

    def _adopt(self, identity: ReferenceId) -> RemoteReference:
        """Return a reference that arrived with a lease for this rank; the owner takes the lease now."""
        if identity.owner >= self.world:
            raise ProtocolError(f"a reference to an object of rank {identity.owner}, which does not exist")
        if identity.owner == self.rank:
            refusal = self._objects.lend(identity.serial, self.rank)
            if refusal is not None:
                raise RunError(f"a reference came back too late: {refusal}")
        return self._hold(identity)

    def _hold(self, identity: ReferenceId) -> RemoteReference:
        with self._state:
            self._held[identity] += 1
        return RemoteReference(self, identity)

    def _release_all(self) -> None:
        """Release all references of this worker, before it says goodbye."""
        dropped = threading.Event()
        self._drops.put(dropped)
        dropped.wait(_CLOSE_S)
        with self._state:
            held, self._held = self._held, Counter()
            self._counts["leaked"] += held.total()
        for identity in held.elements():
            self._return_lease(identity, self.rank)

    def _keep_time(self) -> None:
        """Time out results and release dropped references, on a thread of its own."""
        while not self._is_stopped:
            try:
                item = self._drops.get(timeout=self._pending.expire())
            except queue.Empty:
                continue
            if isinstance(item, threading.Event):
                item.set()
            elif item is not None:
                self._release(item)

    def _release(self, identity: ReferenceId) -> None:
        with self._state:
            left = self._held.pop(identity, 0)
            if not left:
                return  # a stop has released it
            if left > 1:
                self._held[identity] = left - 1
        self._return_lease(identity, self.rank)

    # messages

    def _post(self, to: int, message: Message, contents: Sequence[Content] = ()) -> BarnraiseError | None:
        """Send a message to a rank. Return the error if that is not possible."""
        error = self._lost.get(to)
        if error is None and self._is_stopped:
            error = OperationAborted(_STOPPED, hint="Call rpc.start() to continue.")
        if error is not None:
            return error
        try:
            packet = encode_packet(message, contents)
        except (RunError, ValueError) as failure:
            is_ours = isinstance(failure, RunError)
            return failure if is_ours else RunError(f"a remote call cannot be encoded: {failure}")
        if self._channels[to].send(packet, always=not contents):
            return None
        return RunError(
            f"too many bytes wait to be sent to rank {to}",
            hint="Wait for earlier futures before further calls.",
        )

    def _count(self, what: str) -> None:
        with self._state:
            self._counts[what] += 1

    def _check(self, to: int, timeout_s: float) -> None:
        if self._is_stopped:
            raise RunError(_STOPPED, hint="Call rpc.start() on all workers to continue.")
        if not 0 <= to < self.world:
            raise RunError(f"there is no rank {to}", hint=f"The ranks are 0 to {self.world - 1}.")
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise RunError(
                f"a remote call cannot have a timeout of {timeout_s} s",
                hint=f"Use more than 0 and at most {MAX_TIMEOUT_S:g} seconds.",
            )

    def _others(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]

    def _late_ranks(self) -> tuple[int, ...]:
        return tuple(
            rank for rank in self._others() if rank not in self._departed and rank not in self._lost
        )


class _Loopback:
    """Channel of a worker to itself."""

    def __init__(self, endpoint: RpcEndpoint) -> None:
        self._endpoint = endpoint

    def send(self, packet: bytearray, *, always: bool = False) -> bool:
        view = memoryview(packet)
        head, body = read_sizes(view[:FRAME_BYTES]).split(view)
        self._endpoint.receive(self._endpoint.rank, head, body)
        return True

    def close(self, flush_s: float) -> None:
        """Close nothing: messages to this worker itself never wait."""
