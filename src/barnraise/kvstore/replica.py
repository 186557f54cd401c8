"""One agent's copy of the board, kept equal to the others'. Pure: messages and time in, effects out.

In every view the most senior voter is the primary. It first learns from the others what was held before
(see ``gathering``), then numbers the operations and answers those that a quorum holds; reads too, so that
a primary that was replaced without knowing it can answer nothing. Copies live in memory: workers die with
their agent, so nobody needs what a whole house forgot. Whoever still does is told that it is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from barnraise.agent_client.kv_messages import WRITES, Operation, WatchKey
from barnraise.core.errors import ProtocolError
from barnraise.kvstore.messages import (
    NOBODY,
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
    ReplicaView,
    ResendRequest,
    SnapshotChunk,
    SnapshotRequest,
    ViewBallot,
    ViewPromise,
)
from barnraise.kvstore.pending import PendingRequests, ToSubmit
from barnraise.kvstore.primary import Primary, RequestOrigin
from barnraise.kvstore.snapshot import ReceivedSnapshot, ReplicaLog, SnapshotReceiver, SnapshotSender
from barnraise.kvstore.store import KeyValueStore
from barnraise.kvstore.view_change import StartEmpty, ViewChange, WaitFor, founding_name, judge

TICK_S = 0.1
PATIENCE_S = 30.0
_RETRY_S = 0.25
_LEFT_S = 5.0  # how long those who are no longer members may take to say what they hold
_STALLED_S = 3.0
_MOST_VIEWS = 64
_MOST_EARLY = 1000


class KvReplica:
    """``nonce``: 16 random bytes of this start. ``last_view``: the newest view on disk that was there before
    this start (not one that lists this incarnation), 0 if none: in those it reigns over nobody."""

    def __init__(
        self,
        me: bytes,
        is_quorum: IsQuorum,
        nonce: bytes,
        *,
        last_view: int = 0,
        name: Callable[[bytes], str] = lambda node: node.hex()[:8],
    ) -> None:
        self._me = me
        self._is_quorum = is_quorum
        self._nonce = nonce
        self._name = name
        self._blind = last_view  # until this one has got a board
        self._view: ReplicaView | None = None
        self.primary: bytes | None = None
        self._known: dict[int, ReplicaView] = {}
        self._promised = NOBODY
        self._copy = ReplicaLog()
        self._donor = SnapshotSender(self._copy)
        self._requests = PendingRequests()
        self._reign: Primary | None = None
        self._gathering: ViewChange | None = None
        self._fetching: SnapshotReceiver | None = None
        self._fetches = 0
        self._early: dict[RequestOrigin, Operation] = {}
        self._knocked = self._now = -1e9
        self._out: list[Effect] = []

    # what others want to know

    @property
    def serves(self) -> bool:
        """Whether this is the primary and a quorum follows it."""
        return self._reign is not None and self._reign.committed >= 0

    @property
    def number(self) -> int:
        """How many operations the copy here has seen."""
        return self._copy.number

    def waiting(self) -> str | None:
        """For whom the requests wait, and why; None if there are none, or nothing is in their way."""
        if self._gathering is None and not self._requests.linger(self._now):
            return None
        view = self._view
        if view is None:
            return "this machine is in no view of the cluster yet"
        if self._me not in view.members:
            return f"this machine is not in view {view.number} of the cluster"
        if self._gathering is not None:
            missing = self._gathering.waits_for
            names = ", ".join(map(self._name, missing)) or "a member that knows who was there"
            return f"the board waits for {names}: they may hold what was written before view {view.number}"
        if self._reign is not None:
            names = ", ".join(map(self._name, self._reign.missing()))
            return f"too few of view {view.number} hold it; the board waits for {names}" if names else None
        if self.primary == self._me:
            return f"this machine was started again and waits for a view after {view.number}"
        primary = "a voter" if self.primary is None else self._name(self.primary)
        return f"the board waits for {primary}, which keeps it in view {view.number}"

    # events

    def view_changed(self, view: ReplicaView, now: float) -> list[Effect]:
        """A newer view was decided and is on disk. Tell a member that leaves of it too: it may be asked."""
        if self._view is not None and view.number <= self._view.number:
            return []
        self._view, self.primary = view, view.primary
        self._learn(view)
        self._reign = self._gathering = self._fetching = None
        self._early.clear()
        if self.primary == self._me and view.number > self._blind:
            self._gather(1, now)
        self._submit(self._requests.unanswered(now, 0.0), now)
        return self._done(now)

    def request(
        self, operation: Operation | WatchKey, ticket: object, now: float, patience_s: float = PATIENCE_S
    ) -> list[Effect]:
        """An operation of a client of this machine; its answer comes as an effect, at the latest when the
        patience has ended."""
        refused = self._requests.add(operation, ticket, now + patience_s, now)
        if refused is not None:
            self._out.append(refused)
        return self._done(now)

    def forget(self, ticket: object) -> None:
        """The client has gone: no answer is wanted any more."""
        self._requests.forget(ticket)

    def tick(self, now: float) -> list[Effect]:
        """Call every TICK_S."""
        self._now = now
        self._donor.tick(now)
        why = self.waiting() or "the cluster was too slow to answer"
        self._out += self._requests.tick(now, why)
        if self._gathering is not None:
            self._keep_gathering(now)
        if self._reign is not None:
            self._out += self._reign.tick(now)
        if self._fetching is not None and self._fetching.is_overdue(now):
            self._out.append(ReplicaSend(self._fetching.donor, self._fetching.request(now)))
        self._knock(now)
        self._submit(self._requests.unanswered(now), now)
        return self._done(now)

    def receive(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        """From a node whose link has proved who it is."""
        match message:
            case PrepareView():
                self._on_gather(sender, message)
            case ViewPromise():
                self._on_promise(sender, message, now)
            case BallotRejected():
                self._on_outbid(message, now)
            case AppendEntry():
                self._on_prepare(sender, message, now)
            case AppendAck():
                if self._reign is not None:
                    self._out += self._reign.held(sender, message, now)
            case ResendRequest():
                if self._reign is not None and self._view is not None and message.view == self._view.number:
                    self._out += self._reign.knocked(sender, now)
            case SnapshotRequest():
                self._on_fetch(sender, message, now)
            case SnapshotChunk():
                self._on_chunk(sender, message, now)
            case ForwardedRequest():
                self._on_forward(sender, message, now)
            case ClientReply():
                if message.life == self._nonce:
                    answer = self._requests.answered(message.request, message.result)
                    self._out += [] if answer is None else [answer]
        return self._done(now)

    def _learn(self, view: ReplicaView) -> None:
        self._known.setdefault(view.number, view)
        while len(self._known) > _MOST_VIEWS:
            del self._known[min(self._known)]

    # becoming the primary

    def _gather(self, attempt: int, now: float) -> None:
        assert self._view is not None
        began = now if self._gathering is None else self._gathering.began
        self._promised = ViewBallot(self._view.number, attempt, self._nonce)
        self._fetching = None
        self._gathering = ViewChange(self._promised, began)
        self._gathering.replies[self._me] = self._promise(())
        self._ask_around(now)
        self._consider(now)

    def _ask_around(self, now: float) -> None:
        """Ask everyone who may hold something: members, and voters of the views before."""
        assert self._view is not None
        assert self._gathering is not None
        self._gathering.asked = now
        question = PrepareView(self._gathering.ballot, tuple(self._known))
        nodes = self._gathering.unheard(self._view, self._known)
        self._out += [ReplicaSend(node, question) for node in nodes]

    def _keep_gathering(self, now: float) -> None:
        assert self._gathering is not None
        if self._fetching is not None:
            if now - self._fetching.progress > _STALLED_S:
                self._gather(self._promised.attempt + 1, now)
            return
        if now - self._gathering.asked > _RETRY_S:
            self._ask_around(now)
        self._consider(now)

    def _on_promise(self, sender: bytes, message: ViewPromise, now: float) -> None:
        gathering = self._gathering
        if gathering is None or message.ballot != gathering.ballot or self._fetching is not None:
            return
        gathering.replies[sender] = message
        for view in message.views:
            self._learn(view)
        self._consider(now)

    def _on_outbid(self, message: BallotRejected, now: float) -> None:
        gathering = self._gathering
        if gathering is None or message.ballot != gathering.ballot:
            return
        if message.promised.view == gathering.ballot.view:
            self._gather(max(message.promised.attempt, gathering.ballot.attempt) + 1, now)

    def _consider(self, now: float) -> None:
        """Reign if it is known what was held before; fetch it if another one holds it."""
        view, gathering = self._view, self._gathering
        if view is None or gathering is None or self._fetching is not None:
            return
        impatient = now - gathering.began > _LEFT_S
        verdict = judge(view, gathering.replies, self._known, self._is_quorum, impatient=impatient)
        if isinstance(verdict, WaitFor):
            gathering.waits_for = verdict.missing
            return
        if isinstance(verdict, StartEmpty):
            self._found(verdict.lost, now)
            return
        best = gathering.replies[verdict.node]
        if (best.held, best.number) == (self._copy.held, self._copy.number):
            self._begin_reign(now, anew=False)
        else:
            gathering.wanted = best
            gathering.waits_for = (verdict.node,)
            self._fetch(verdict.node, gathering.ballot, now)

    def _found(self, lost: str, now: float) -> None:
        assert self._gathering is not None
        ballot, replies = self._gathering.ballot, self._gathering.replies
        number = max(reply.number for reply in replies.values())
        if lost and any(reply.held != NOBODY for reply in replies.values()):
            self._out.append(ReplicaNote(f"the board lost its memory and begins anew: {lost}"))
        self._copy.replace(KeyValueStore(founding_name(ballot)), NOBODY, number + 1)
        self._begin_reign(now, anew=True)

    def _begin_reign(self, now: float, *, anew: bool) -> None:
        assert self._view is not None
        assert self._gathering is not None
        self._reign = Primary(self._me, self._view, self._gathering.ballot, self._copy, now)
        self._gathering = None
        self._blind = 0
        self._out += self._reign.begin(now, anew=anew)
        self._requests.changed(self._copy.board, None, now)
        early, self._early = self._early, {}
        for origin, operation in early.items():
            self._take(operation, origin, now)

    # following

    def _promise(self, known: tuple[int, ...]) -> ViewPromise:
        views = tuple(
            view
            for number, view in self._known.items()
            if self._copy.held.view <= number < self._promised.view and number not in known
        )
        return ViewPromise(self._promised, self._copy.held, self._copy.number, self._blind, views)

    def _on_gather(self, sender: bytes, message: PrepareView) -> None:
        if not self._is_from_primary(sender, message.ballot):
            return
        if self._outbids(message.ballot):
            self._out.append(ReplicaSend(sender, BallotRejected(message.ballot, self._promised)))
            return
        self._promised = message.ballot
        self._out.append(ReplicaSend(sender, self._promise(message.known)))

    def _on_prepare(self, sender: bytes, message: AppendEntry, now: float) -> None:
        if not self._is_from_primary(sender, message.ballot) or self._outbids(message.ballot):
            return
        self._promised = message.ballot
        copy = self._copy
        if copy.held == message.ballot or (copy.held == message.base and copy.number <= message.base_number):
            self._follow(message, now)
            lacking = copy.number + 1 < message.oldest
        else:
            lacking = True
        if not lacking:
            self._fetching = None
        elif self._fetching is None or self._fetching.ballot != message.ballot:
            self._fetch(sender, message.ballot, now)
        self._say_held(sender)

    def _follow(self, message: AppendEntry, now: float) -> None:
        copy = self._copy
        for number, operation in enumerate(message.operations, message.first):
            self._adopt(message)
            if number == copy.number + 1:
                copy.apply(operation)
                self._notice(operation, now)
        self._adopt(message)

    def _adopt(self, message: AppendEntry) -> None:
        """The copy belongs to the new reign once it has all that the reign began with."""
        if self._copy.number >= message.base_number and self._copy.held != message.ballot:
            self._copy.held = message.ballot
            self._blind = 0

    def _say_held(self, primary: bytes) -> None:
        copy, fetching = self._copy, self._fetching is not None
        follows = copy.held == self._promised
        self._out.append(ReplicaSend(primary, AppendAck(self._promised, copy.number, follows, fetching)))

    def _is_from_primary(self, sender: bytes, ballot: ViewBallot) -> bool:
        view = self._view
        return view is not None and ballot.view == view.number and sender == self.primary != self._me

    def _outbids(self, ballot: ViewBallot) -> bool:
        """Whether this one has promised not to follow that ballot."""
        promised = self._promised
        return ballot != promised and ballot.rank <= promised.rank

    def _knock(self, now: float) -> None:
        """Without a board of this view, after a start or lost messages, ask for one."""
        view = self._view
        if view is None or self._me not in view.members or self.primary is None or self.primary == self._me:
            return
        has_one = self._copy.held.view == view.number or self._fetching is not None
        if not has_one and now - self._knocked > 2 * _RETRY_S:
            self._knocked = now
            self._out.append(ReplicaSend(self.primary, ResendRequest(view.number)))

    # copies on their way

    def _fetch(self, donor: bytes, ballot: ViewBallot, now: float) -> None:
        self._fetches += 1
        ticket = self._nonce[:8] + self._fetches.to_bytes(8, "big")
        self._fetching = SnapshotReceiver(donor, ballot, ticket, now)
        self._out.append(ReplicaSend(donor, self._fetching.request(now)))

    def _on_fetch(self, sender: bytes, message: SnapshotRequest, now: float) -> None:
        view = self._view
        if view is None or message.ballot != self._promised or self._copy.held == NOBODY:
            return
        reigns = self._reign is not None and sender in view.members
        if reigns or sender == self.primary:
            self._out.append(ReplicaSend(sender, self._donor.answer(message, now)))

    def _on_chunk(self, sender: bytes, message: SnapshotChunk, now: float) -> None:
        fetching = self._fetching
        if fetching is None or sender != fetching.donor:
            return
        try:
            got = fetching.receive(message, now)
        except ProtocolError as error:
            self._out.append(ReplicaNote(f"the board of {self._name(sender)} was not taken: {error.message}"))
            self._fetching = None
            return
        if isinstance(got, ReceivedSnapshot):
            self._fetching = None
            self._install(sender, fetching.ballot, got, now)
        elif got:
            self._out.append(ReplicaSend(sender, fetching.request(now)))

    def _install(self, donor: bytes, ballot: ViewBallot, got: ReceivedSnapshot, now: float) -> None:
        if self._gathering is not None:
            wanted = self._gathering.wanted
            if wanted is None or (got.held, got.number) != (wanted.held, wanted.number):
                self._gather(self._promised.attempt + 1, now)
                return
            self._copy.replace(got.board, got.held, got.number)
            self._begin_reign(now, anew=False)
        elif got.held == ballot == self._promised and (self._copy.held != ballot or got.number > self.number):
            self._copy.replace(got.board, got.held, got.number)
            self._blind = 0
            self._requests.changed(got.board, None, now)
            self._say_held(donor)

    # requests

    def _on_forward(self, sender: bytes, message: ForwardedRequest, now: float) -> None:
        if self._view is not None and self.primary == self._me and sender in self._view.members:
            self._take(message.operation, RequestOrigin(sender, message.life, message.request), now)

    def _take(self, operation: Operation, origin: RequestOrigin, now: float) -> None:
        """As the primary; one that does not reign yet keeps it until then."""
        if self._reign is not None:
            self._out += self._reign.take(operation, origin, now)
            self._notice(operation, now)
        elif self._gathering is not None and len(self._early) < _MOST_EARLY:
            self._early[origin] = operation

    def _notice(self, operation: Operation, now: float) -> None:
        if isinstance(operation, WRITES):
            self._requests.changed(self._copy.board, operation.scope, now)

    def _submit(self, requests: Iterator[ToSubmit], now: float) -> None:
        view = self._view
        if view is None or self.primary is None or self._me not in view.members:
            return
        for request, operation in list(requests):
            if self.primary == self._me:
                self._take(operation, RequestOrigin(self._me, self._nonce, request), now)
            else:
                self._out.append(ReplicaSend(self.primary, ForwardedRequest(self._nonce, request, operation)))

    def _done(self, now: float) -> list[Effect]:
        """Answers go last: whoever gets one over the same link has got the operation before."""
        self._submit(self._requests.unsent(), now)
        while self._reign is not None and (due := self._reign.due(self._is_quorum)):
            for origin, result in due:
                if origin.node != self._me:
                    self._out.append(
                        ReplicaSend(origin.node, ClientReply(origin.life, origin.request, result))
                    )
                    continue
                answer = self._requests.answered(origin.request, result)
                self._out += [] if answer is None else [answer]
            self._submit(self._requests.unsent(), now)
        out, self._out = self._out, []
        return out
