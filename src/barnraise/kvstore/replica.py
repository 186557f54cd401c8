"""One replica of the key-value store: operations, and the change to a new primary. Pure.

In every view the most senior voter is the primary. It first runs a view change (see ``view_change``). Then
it numbers the operations and answers those that a quorum has acknowledged. Reads take the same path, so a
replaced primary cannot answer from stale state.

Replicas live in memory. Workers stop with their agent, so no client needs keys after a restart of all
agents. A client that still asks gets the error that the keys are lost.

A replica whose rules are durable is also on a disk. The agent saves what `unsaved` returns before it performs
the effects of an event. So no message or answer leaves before its state is on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from barnraise.agent_client.kv_messages import WRITES, Operation, WatchKey
from barnraise.core.errors import ProtocolError
from barnraise.kvstore.messages import (
    NO_BALLOT,
    AppendAck,
    AppendEntry,
    BallotRejected,
    ClientReply,
    Effect,
    ForwardedRequest,
    IsQuorum,
    Message,
    PrepareView,
    ReplicaNote,
    ReplicaSend,
    ReplicaState,
    ReplicaView,
    ResendRequest,
    SavedReplica,
    SnapshotChunk,
    SnapshotRequest,
    UnsavedChange,
    ViewBallot,
    ViewPromise,
)
from barnraise.kvstore.pending import PendingRequests, ToSubmit
from barnraise.kvstore.primary import Primary, RequestOrigin
from barnraise.kvstore.snapshot import ReceivedSnapshot, ReplicaLog, SnapshotReceiver, SnapshotSender
from barnraise.kvstore.store import IN_MEMORY, KeyValueStore, StoreRules
from barnraise.kvstore.view_change import (
    StartEmpty,
    UseOwnLog,
    ViewChange,
    WaitFor,
    choose_durable_log,
    choose_log,
    founding_id,
)

TICK_S = 0.1
REQUEST_TIMEOUT_S = 30.0
_RETRY_S = 0.25
_FORMER_MEMBERS_S = 5.0  # how long former members may take to answer
_STALLED_S = 3.0
_MAX_VIEWS = 64
_MAX_DURABLE_VIEWS = 4096  # that a durable replica knows; a message has the newest `_MAX_VIEWS` of them
_MAX_EARLY_REQUESTS = 1000


class KvReplica:
    """Replica of the store on one machine.

    ``nonce``: 16 random bytes of this incarnation. ``last_view``: number of the newest view on disk from
    before this start, not one that lists this incarnation; 0 if there is none. The replica does not become
    primary in a view up to ``last_view``. ``saved``: what the disk of a durable replica has. ``is_gone``:
    tells whether a node was removed from the cluster, so that its disk cannot be waited for.
    """

    def __init__(
        self,
        me: bytes,
        is_quorum: IsQuorum,
        nonce: bytes,
        *,
        last_view: int = 0,
        name: Callable[[bytes], str] = lambda node: node.hex()[:8],
        rules: StoreRules = IN_MEMORY,
        saved: SavedReplica | None = None,
        is_gone: Callable[[bytes], bool] = lambda node: False,
    ) -> None:
        self._me = me
        self._is_quorum = is_quorum
        self._nonce = nonce
        self._name = name
        self._rules = rules
        self._is_gone = is_gone
        self._last_view = last_view
        self._forgotten_until = last_view  # until this replica has the store again
        self._view: ReplicaView | None = None
        self.primary: bytes | None = None
        self._known_views: dict[int, ReplicaView] = {}
        self._promised = NO_BALLOT
        self._log = ReplicaLog(rules)
        self._snapshot_sender = SnapshotSender(self._log)
        self._pending = PendingRequests()
        self._primary: Primary | None = None
        self._view_change: ViewChange | None = None
        self._snapshot_receiver: SnapshotReceiver | None = None
        self._transfers = 0
        self._early_requests: dict[RequestOrigin, Operation] = {}
        self._resend_requested_at = self._now = -1e9
        self._effects: list[Effect] = []
        self._saved_state: ReplicaState | None = None
        if saved is not None:
            self._restore(saved)

    # the disk of a durable replica

    def _restore(self, saved: SavedReplica) -> None:
        """Continue with the state of an earlier process. Raise ProtocolError if it cannot be read."""
        state, rules = saved.state, self._rules
        store = KeyValueStore.from_snapshot(saved.snapshot, rules) if saved.snapshot else self._log.store
        for number, operation in saved.operations:
            store.apply(operation, number)
        self._log.replace(store, state.log_ballot, state.op_number)
        self._log.is_replaced = False
        self._promised, self._forgotten_until = state.promised, state.forgotten_until
        self._known_views = {view.number: view for view in state.views}
        self._saved_state = self._state()

    def _state(self) -> ReplicaState:
        log = self._log
        views = self._newest_views(lambda number: number >= log.log_ballot.view)
        return ReplicaState(self._promised, log.log_ballot, log.op_number, self._forgotten_until, views)

    def _newest_views(self, is_wanted: Callable[[int], bool]) -> tuple[ReplicaView, ...]:
        """Return the newest known views, as many as a message may have."""
        numbers = sorted(filter(is_wanted, self._known_views))[-_MAX_VIEWS:]
        return tuple(self._known_views[number] for number in numbers)

    def unsaved(self, *, whole: bool = False) -> UnsavedChange | None:
        """Return what the disk lacks, and count it as saved; None if it lacks nothing.

        ``whole``: include a snapshot. A log that only reads have made longer needs no save: a shorter one
        has the same contents.
        """
        log, state = self._log, self._state()
        last = self._saved_state
        is_same = last is not None and last == replace(state, op_number=last.op_number)
        if is_same and not log.unsaved and not log.is_replaced:
            return None
        with_snapshot = whole or log.is_replaced
        operations = () if with_snapshot else tuple(log.unsaved)
        log.unsaved.clear()
        log.is_replaced = False
        self._saved_state = state
        return UnsavedChange(state, operations, log.store.to_snapshot() if with_snapshot else None)

    # state

    @property
    def op_number(self) -> int:
        """Return the number of operations that the local log has seen."""
        return self._log.op_number

    def wait_reason(self) -> str | None:
        """Return a sentence that says what the requests wait for; None if nothing blocks them."""
        if self._view_change is None and not self._pending.has_slow(self._now):
            return None
        view = self._view
        if view is None:
            return "this machine has not joined the cluster yet"
        if self._me not in view.members:
            return "this machine is not in the cluster now"
        if self._view_change is not None:
            missing = self._view_change.waiting_for
            names = ", ".join(map(self._name, missing)) or "a machine that was here before"
            return f"the {self._rules.noun} waits for {names}, which may hold earlier writes"
        if self._primary is not None:
            names = ", ".join(map(self._name, self._primary.lagging_voters()))
            if not names:
                return None
            return f"too few owners have acknowledged; the {self._rules.noun} waits for {names}"
        if self.primary == self._me:
            return "this machine was restarted and is still joining the cluster"
        primary = "a voter" if self.primary is None else self._name(self.primary)
        return f"the {self._rules.noun} waits for {primary}, its primary"

    @property
    def first_unknown_view(self) -> int:
        """Return the number from which on a durable replica has to be told the views.

        It needs those since its log. A replica that may have lost its log needs those since then.
        """
        if self._view is not None:
            return self._view.number + 1
        ballot = self._log.log_ballot
        return self._forgotten_until + 1 if ballot == NO_BALLOT else ballot.view

    # events

    def on_view_change(
        self, view: ReplicaView, now: float, earlier: Iterable[ReplicaView] = ()
    ) -> list[Effect]:
        """Handle a newer view that was decided and is on disk.

        ``earlier``: the views from `first_unknown_view` on that were decided without this replica. Call it on
        leaving members as well: the new primary may ask them for their log.
        """
        if self._view is not None and view.number <= self._view.number:
            return []
        self._view, self.primary = view, view.primary
        for past in (*earlier, view):
            self._remember_view(past)
        if self._rules.is_durable:
            oldest = self._log.log_ballot.view
            self._known_views = {
                number: past for number, past in self._known_views.items() if number >= oldest
            }
        self._primary = self._view_change = self._snapshot_receiver = None
        self._early_requests.clear()
        if self.primary == self._me and view.number > self._last_view:
            self._start_view_change(1, now)
        self._send_requests(self._pending.unanswered(now, 0.0), now)
        return self._drain_effects(now)

    def request(
        self,
        operation: Operation | WatchKey,
        ticket: object,
        now: float,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> list[Effect]:
        """Submit an operation of a local client; its answer follows as an effect, at the latest after the
        timeout.
        """
        rejection = self._pending.add(operation, ticket, now + timeout_s, now)
        if rejection is not None:
            self._effects.append(rejection)
        return self._drain_effects(now)

    def cancel(self, ticket: object) -> None:
        """Drop the request of a client that has gone."""
        self._pending.cancel(ticket)

    def tick(self, now: float) -> list[Effect]:
        """Handle timeouts and retries; call it every ``TICK_S`` seconds."""
        self._now = now
        self._snapshot_sender.tick(now)
        why = self.wait_reason() or "the cluster did not answer in time"
        self._effects += self._pending.tick(now, why)
        if self._view_change is not None:
            self._continue_view_change(now)
        if self._primary is not None:
            self._effects += self._primary.tick(now)
        if self._snapshot_receiver is not None and self._snapshot_receiver.is_overdue(now):
            self._effects.append(
                ReplicaSend(self._snapshot_receiver.source, self._snapshot_receiver.request(now))
            )
        self._request_resend(now)
        self._send_requests(self._pending.unanswered(now), now)
        return self._drain_effects(now)

    def receive(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        """Handle a message from an authenticated node."""
        match message:
            case PrepareView():
                self._on_prepare_view(sender, message)
            case ViewPromise():
                self._on_promise(sender, message, now)
            case BallotRejected():
                self._on_ballot_rejected(message, now)
            case AppendEntry():
                self._on_append(sender, message, now)
            case AppendAck():
                if self._primary is not None:
                    self._effects += self._primary.on_ack(sender, message, now)
            case ResendRequest():
                if self._primary is not None and self._view is not None and message.view == self._view.number:
                    self._effects += self._primary.on_resend_request(sender, now)
            case SnapshotRequest():
                self._on_snapshot_request(sender, message, now)
            case SnapshotChunk():
                self._on_snapshot_chunk(sender, message, now)
            case ForwardedRequest():
                self._on_forwarded_request(sender, message, now)
            case ClientReply():
                # Every node may have seen the nonce, so that the sender counts, too.
                if message.incarnation == self._nonce and sender == self.primary:
                    answer = self._pending.on_result(message.request, message.result)
                    self._effects += [] if answer is None else [answer]
        return self._drain_effects(now)

    def _remember_view(self, view: ReplicaView) -> None:
        self._known_views.setdefault(view.number, view)
        while len(self._known_views) > (_MAX_DURABLE_VIEWS if self._rules.is_durable else _MAX_VIEWS):
            del self._known_views[min(self._known_views)]

    # view change: becoming the primary

    def _start_view_change(self, attempt: int, now: float) -> None:
        """Promise a new ballot to itself, and ask the others for their logs."""
        assert self._view is not None
        started_at = now if self._view_change is None else self._view_change.started_at
        self._promised = ViewBallot(self._view.number, attempt, self._nonce)
        self._snapshot_receiver = None
        self._view_change = ViewChange(self._promised, started_at)
        self._view_change.replies[self._me] = self._make_promise(())
        self._send_prepare_view(now)
        self._try_finish_view_change(now)

    def _send_prepare_view(self, now: float) -> None:
        """Ask all nodes that may hold state: members, and voters of earlier views."""
        assert self._view is not None
        assert self._view_change is not None
        self._view_change.asked_at = now
        known = tuple(sorted(self._known_views)[-_MAX_VIEWS:])
        prepare = PrepareView(self._view_change.ballot, known)
        nodes = self._view_change.nodes_to_ask(self._view, self._known_views)
        self._effects += [ReplicaSend(node, prepare) for node in nodes]

    def _continue_view_change(self, now: float) -> None:
        """Repeat what was not answered; start another attempt if the snapshot transfer has stalled."""
        assert self._view_change is not None
        if self._snapshot_receiver is not None:
            if now - self._snapshot_receiver.progress_at > _STALLED_S:
                self._start_view_change(self._promised.attempt + 1, now)
            return
        if now - self._view_change.asked_at > _RETRY_S:
            self._send_prepare_view(now)
        self._try_finish_view_change(now)

    def _on_promise(self, sender: bytes, message: ViewPromise, now: float) -> None:
        change = self._view_change
        if change is None or message.ballot != change.ballot or self._snapshot_receiver is not None:
            return
        change.replies[sender] = message
        for view in message.views:
            self._remember_view(view)
        self._try_finish_view_change(now)

    def _on_ballot_rejected(self, message: BallotRejected, now: float) -> None:
        change = self._view_change
        if change is None or message.ballot != change.ballot:
            return
        if message.promised.view == change.ballot.view:
            self._start_view_change(max(message.promised.attempt, change.ballot.attempt) + 1, now)

    def _try_finish_view_change(self, now: float) -> None:
        """Start as primary once the newest log is known; fetch it first if another node holds it."""
        view, change = self._view, self._view_change
        if view is None or change is None or self._snapshot_receiver is not None:
            return
        is_overdue = now - change.started_at > _FORMER_MEMBERS_S
        known, replies = self._known_views, change.replies
        if self._rules.is_durable:
            choice, lost = choose_durable_log(
                view, replies, known, self._is_quorum, self._is_gone, is_overdue=is_overdue
            )
            if lost and isinstance(choice, UseOwnLog):
                self._effects.append(
                    ReplicaNote(f"the {self._rules.noun} may lack the newest entries: {lost}")
                )
        else:
            choice = choose_log(view, replies, known, self._is_quorum, is_overdue=is_overdue)
        if isinstance(choice, WaitFor):
            change.waiting_for = choice.missing
            return
        if isinstance(choice, StartEmpty):
            self._start_empty(choice.lost, now)
            return
        best = change.replies[choice.node]
        if (best.log_ballot, best.op_number) == (self._log.log_ballot, self._log.op_number):
            self._become_primary(now, is_empty=False)
        else:
            change.wanted = best
            change.waiting_for = (choice.node,)
            self._request_snapshot(choice.node, change.ballot, now)

    def _start_empty(self, lost: str, now: float) -> None:
        """Start as primary of an empty store, under a new history id."""
        assert self._view_change is not None
        ballot, replies = self._view_change.ballot, self._view_change.replies
        number = max(reply.op_number for reply in replies.values())
        if lost and any(reply.log_ballot != NO_BALLOT for reply in replies.values()):
            self._effects.append(ReplicaNote(f"the store lost its contents and starts empty: {lost}"))
        self._log.replace(KeyValueStore(founding_id(ballot), self._rules), NO_BALLOT, number + 1)
        self._become_primary(now, is_empty=True)

    def _become_primary(self, now: float, *, is_empty: bool) -> None:
        """Start as primary and submit the requests that arrived early."""
        assert self._view is not None
        assert self._view_change is not None
        self._primary = Primary(self._me, self._view, self._view_change.ballot, self._log, now)
        self._view_change = None
        self._forgotten_until = 0
        self._effects += self._primary.start(now, is_empty=is_empty)
        self._pending.recheck_watches(self._log.store, None, now)
        requests, self._early_requests = self._early_requests, {}
        for origin, operation in requests.items():
            self._submit_as_primary(operation, origin, now)

    # the backup's side

    def _make_promise(self, known: tuple[int, ...]) -> ViewPromise:
        """Return the reply to `PrepareView`, with the views that its sender does not know."""
        oldest, newest = self._log.log_ballot.view, self._promised.view
        views = self._newest_views(lambda number: oldest <= number < newest and number not in known)
        return ViewPromise(
            self._promised, self._log.log_ballot, self._log.op_number, self._forgotten_until, views
        )

    def _on_prepare_view(self, sender: bytes, message: PrepareView) -> None:
        if not self._is_from_primary(sender, message.ballot):
            return
        if self._is_superseded(message.ballot):
            self._effects.append(ReplicaSend(sender, BallotRejected(message.ballot, self._promised)))
            return
        self._promised = message.ballot
        self._effects.append(ReplicaSend(sender, self._make_promise(message.known)))

    def _on_append(self, sender: bytes, message: AppendEntry, now: float) -> None:
        if not self._is_from_primary(sender, message.ballot) or self._is_superseded(message.ballot):
            return
        self._promised = message.ballot
        log = self._log
        if log.log_ballot == message.ballot or (
            log.log_ballot == message.base_ballot and log.op_number <= message.base_op_number
        ):
            self._append(message, now)
            needs_snapshot = log.op_number + 1 < message.oldest_op
        else:
            needs_snapshot = True
        if not needs_snapshot:
            self._snapshot_receiver = None
        elif self._snapshot_receiver is None or self._snapshot_receiver.ballot != message.ballot:
            self._request_snapshot(sender, message.ballot, now)
        self._send_ack(sender)

    def _append(self, message: AppendEntry, now: float) -> None:
        """Append the operations that the log does not have yet."""
        log = self._log
        for number, operation in enumerate(message.operations, message.first_op):
            self._adopt_ballot(message)
            if number == log.op_number + 1:
                log.apply(operation)
                self._notify_watches(operation, now)
        self._adopt_ballot(message)

    def _adopt_ballot(self, message: AppendEntry) -> None:
        """Mark the log as following the new primary once it has all that the primary started from."""
        if self._log.op_number >= message.base_op_number and self._log.log_ballot != message.ballot:
            self._log.log_ballot = message.ballot
            self._forgotten_until = 0

    def _send_ack(self, primary: bytes) -> None:
        log, is_fetching = self._log, self._snapshot_receiver is not None
        follows = log.log_ballot == self._promised
        self._effects.append(
            ReplicaSend(primary, AppendAck(self._promised, log.op_number, follows, is_fetching))
        )

    def _is_from_primary(self, sender: bytes, ballot: ViewBallot) -> bool:
        view = self._view
        return view is not None and ballot.view == view.number and sender == self.primary != self._me

    def _is_superseded(self, ballot: ViewBallot) -> bool:
        """Return True if this replica has promised a ballot that is at least as new."""
        promised = self._promised
        return ballot != promised and ballot.rank <= promised.rank

    def _request_resend(self, now: float) -> None:
        """Ask the primary for state if this replica has none of the current view."""
        view = self._view
        if view is None or self._me not in view.members or self.primary is None or self.primary == self._me:
            return
        has_state = self._log.log_ballot.view == view.number or self._snapshot_receiver is not None
        if not has_state and now - self._resend_requested_at > 2 * _RETRY_S:
            self._resend_requested_at = now
            self._effects.append(ReplicaSend(self.primary, ResendRequest(view.number)))

    # snapshots

    def _request_snapshot(self, source: bytes, ballot: ViewBallot, now: float) -> None:
        self._transfers += 1
        transfer = self._nonce[:8] + self._transfers.to_bytes(8, "big")
        self._snapshot_receiver = SnapshotReceiver(source, ballot, transfer, now, self._rules)
        self._effects.append(ReplicaSend(source, self._snapshot_receiver.request(now)))

    def _on_snapshot_request(self, sender: bytes, message: SnapshotRequest, now: float) -> None:
        view = self._view
        if view is None or message.ballot != self._promised or self._log.log_ballot == NO_BALLOT:
            return
        is_primary = self._primary is not None and sender in view.members
        if is_primary or sender == self.primary:
            self._effects.append(ReplicaSend(sender, self._snapshot_sender.answer(message, now)))

    def _on_snapshot_chunk(self, sender: bytes, message: SnapshotChunk, now: float) -> None:
        receiver = self._snapshot_receiver
        if receiver is None or sender != receiver.source:
            return
        try:
            received = receiver.receive(message, now)
        except ProtocolError as error:
            self._effects.append(
                ReplicaNote(f"the snapshot of {self._name(sender)} was rejected: {error.message}")
            )
            self._snapshot_receiver = None
            return
        if isinstance(received, ReceivedSnapshot):
            self._snapshot_receiver = None
            self._install_snapshot(sender, receiver.ballot, received, now)
        elif received:
            self._effects.append(ReplicaSend(sender, receiver.request(now)))

    def _install_snapshot(
        self, source: bytes, ballot: ViewBallot, received: ReceivedSnapshot, now: float
    ) -> None:
        """Replace the log by a received snapshot, and go on as primary or as backup."""
        if self._view_change is not None:
            wanted = self._view_change.wanted
            if wanted is None or (received.log_ballot, received.op_number) != (
                wanted.log_ballot,
                wanted.op_number,
            ):
                self._start_view_change(self._promised.attempt + 1, now)
                return
            self._log.replace(received.store, received.log_ballot, received.op_number)
            self._become_primary(now, is_empty=False)
        elif received.log_ballot == ballot == self._promised and (
            self._log.log_ballot != ballot or received.op_number > self.op_number
        ):
            self._log.replace(received.store, received.log_ballot, received.op_number)
            self._forgotten_until = 0
            self._pending.recheck_watches(received.store, None, now)
            self._send_ack(source)

    # requests

    def _on_forwarded_request(self, sender: bytes, message: ForwardedRequest, now: float) -> None:
        if self._view is not None and self.primary == self._me and sender in self._view.members:
            self._submit_as_primary(
                message.operation, RequestOrigin(sender, message.incarnation, message.request), now
            )

    def _submit_as_primary(self, operation: Operation, origin: RequestOrigin, now: float) -> None:
        """Submit an operation to the log; keep it until the view change has finished."""
        if self._primary is not None:
            self._effects += self._primary.submit(operation, origin, now)
            self._notify_watches(operation, now)
        elif self._view_change is not None and len(self._early_requests) < _MAX_EARLY_REQUESTS:
            self._early_requests[origin] = operation

    def _notify_watches(self, operation: Operation, now: float) -> None:
        if isinstance(operation, WRITES):
            self._pending.recheck_watches(self._log.store, operation.scope, now)

    def _send_requests(self, requests: Iterator[ToSubmit], now: float) -> None:
        """Submit requests of local clients, or forward them to the primary."""
        view = self._view
        if view is None or self.primary is None or self._me not in view.members:
            return
        for request, operation in list(requests):
            if self.primary == self._me:
                self._submit_as_primary(operation, RequestOrigin(self._me, self._nonce, request), now)
            else:
                self._effects.append(
                    ReplicaSend(self.primary, ForwardedRequest(self._nonce, request, operation))
                )

    def _drain_effects(self, now: float) -> list[Effect]:
        """Return all effects, with answers last: an append then reaches a machine before the reply does."""
        self._send_requests(self._pending.unsent(), now)
        while self._primary is not None and (committed := self._primary.take_committed(self._is_quorum)):
            for origin, result in committed:
                if origin.node != self._me:
                    self._effects.append(
                        ReplicaSend(origin.node, ClientReply(origin.incarnation, origin.request, result))
                    )
                    continue
                answer = self._pending.on_result(origin.request, result)
                self._effects += [] if answer is None else [answer]
            self._send_requests(self._pending.unsent(), now)
        effects, self._effects = self._effects, []
        return effects
