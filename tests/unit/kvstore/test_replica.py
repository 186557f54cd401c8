"""Replicas of the key-value store in single steps: quorum, view change, snapshots and watches."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.agent_client.kv_messages import (
    AddToKey,
    GetKey,
    KvDenied,
    KvDone,
    Namespace,
    Operation,
    Result,
    SetKey,
    WatchKey,
)
from barnraise.core.errors import ProtocolError
from barnraise.kvstore import primary
from barnraise.kvstore.messages import (
    CHUNK_BYTES,
    NO_BALLOT,
    AppendAck,
    AppendEntry,
    Effect,
    ForwardedRequest,
    Message,
    PrepareView,
    ReplicaAnswer,
    ReplicaSend,
    ReplicaView,
    SavedReplica,
    SnapshotChunk,
    SnapshotRequest,
    ViewBallot,
    ViewPromise,
    decode_message,
    encode_message,
)
from barnraise.kvstore.replica import KvReplica
from barnraise.kvstore.snapshot import ReplicaLog
from barnraise.kvstore.store import StoreRules
from barnraise.kvstore.view_change import StartEmpty, UseOwnLog, WaitFor, choose_durable_log, choose_log
from tests.unit.kvstore.kv_servers import is_quorum

A, B, C, D = b"A", b"B", b"C", b"D"
SCOPE = Namespace("run", 1)


def view(number: int, members: bytes, *, forced: bool = False) -> ReplicaView:
    nodes = tuple(bytes([letter]) for letter in members)
    return ReplicaView(number, nodes, frozenset(nodes), forced)


def is_serving(replica: KvReplica) -> bool:
    """Return True if the replica is the primary and a quorum follows it."""
    return replica._primary is not None and replica._primary.commit_number >= 0


class Replicas:
    """Replicas that receive messages at once, unless they are cut off."""

    def __init__(self, names: bytes) -> None:
        self.now = 0.0
        self.replicas = {bytes([letter]): self.start(bytes([letter])) for letter in names}
        self.cut: set[bytes] = set()
        self.answers: dict[object, Result] = {}
        self.mail: deque[tuple[bytes, ReplicaSend]] = deque()
        self.sent: list[Message] = []
        self.serial = 0

    def start(self, name: bytes, last_view: int = 0, incarnation: int = 0) -> KvReplica:
        return KvReplica(
            name, is_quorum, name * 8 + bytes([incarnation]) * 8, last_view=last_view, name=bytes.decode
        )

    def restart(self, name: bytes, last: ReplicaView) -> None:
        self.replicas[name] = self.start(name, last.number, incarnation=last.number)
        self.perform(name, self.replicas[name].on_view_change(last, self.now))

    def perform(self, name: bytes, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ReplicaSend):
                self.mail.append((name, effect))
            elif isinstance(effect, ReplicaAnswer):
                assert effect.ticket not in self.answers, "answered twice"
                self.answers[effect.ticket] = effect.result

    def settle(self) -> None:
        while self.mail:
            sender, send = self.mail.popleft()
            if not {sender, send.to} & self.cut:
                self.sent.append(send.message)
                self.perform(send.to, self.replicas[send.to].receive(sender, send.message, self.now))

    def change_view(self, new: ReplicaView, *names: bytes) -> None:
        for name in names or new.members:
            self.perform(name, self.replicas[name].on_view_change(new, self.now))
        self.settle()

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            for name, replica in self.replicas.items():
                if name not in self.cut:
                    self.perform(name, replica.tick(self.now))
            self.settle()

    def ask(
        self, at: bytes, kind: type, *fields: object, timeout: float = 30.0, founding: bytes = b""
    ) -> object:
        self.serial += 1
        operation: Operation = kind(SCOPE, at * 16, self.serial, founding, *fields)
        self.perform(at, self.replicas[at].request(operation, self.serial, self.now, timeout))
        self.settle()
        return self.serial

    def done(self, ticket: object) -> KvDone:
        result = self.answers[ticket]
        assert isinstance(result, KvDone), result
        return result


def test_single_replica_serves_at_once() -> None:
    cluster = Replicas(b"A")
    cluster.change_view(view(1, b"A"))
    assert is_serving(cluster.replicas[A])
    assert cluster.done(cluster.ask(A, AddToKey, "n", 1)).count == 1


def test_answered_operation_is_held_by_all_replicas() -> None:
    cluster = Replicas(b"ABC")
    cluster.change_view(view(1, b"ABC"))
    for name in (A, B, C):
        cluster.ask(name, SetKey, f"by {name.decode()}", b"")
    assert len({replica.op_number for replica in cluster.replicas.values()}) == 1
    assert all(replica._log.store.has(SCOPE, "by A") for replica in cluster.replicas.values())


def test_request_without_quorum_times_out_and_names_missing_voters() -> None:
    cluster = Replicas(b"ABC")
    cluster.change_view(view(1, b"ABC"))
    cluster.cut = {B, C}
    for kind, fields in ((SetKey, ("k", b"")), (GetKey, ("k",))):
        ticket = cluster.ask(A, kind, *fields, timeout=3.0)
        assert ticket not in cluster.answers, "not even a read"
        cluster.wait(2.0)
        assert (
            cluster.replicas[A].wait_reason() == "too few owners have acknowledged; the store waits for B, C"
        )
        cluster.wait(1.5)
        late = cluster.answers[ticket]
        assert isinstance(late, KvDenied)
        assert (late.reason, "waits for B, C" in late.message) == ("late", True)
    ticket = cluster.ask(B, GetKey, "k", timeout=3.0)
    cluster.cut = {A}
    cluster.wait(4.0)
    assert "waits for A, its primary" in str(cluster.answers[ticket])


def test_half_of_voters_with_most_senior_is_a_quorum() -> None:
    cluster = Replicas(b"AB")
    cluster.change_view(view(1, b"AB"))
    cluster.cut = {B}
    assert cluster.done(cluster.ask(A, AddToKey, "n", 1)).count == 1


def test_replaced_primary_answers_nothing() -> None:
    cluster = Replicas(b"ABC")
    cluster.change_view(view(1, b"ABC"))
    cluster.ask(A, SetKey, "k", b"old")
    cluster.cut = {A}
    cluster.change_view(view(2, b"BC"), B, C)
    cluster.ask(B, SetKey, "k", b"new")
    cluster.cut = set()
    reading = cluster.ask(A, GetKey, "k")
    cluster.wait(1.0)
    assert reading not in cluster.answers
    cluster.change_view(view(3, b"BCA"))
    assert cluster.done(reading).value == b"new"


def test_operation_in_flight_is_applied_once_in_next_view() -> None:
    cluster = Replicas(b"ABC")
    cluster.change_view(view(1, b"ABC"))
    ticket = cluster.ask(C, AddToKey, "n", 1)
    assert cluster.done(ticket).count == 1
    cluster.cut = {A}
    ticket = cluster.ask(C, AddToKey, "n", 1)
    assert ticket not in cluster.answers
    cluster.change_view(view(2, b"BC"), B, C)
    assert cluster.done(ticket).count == 2
    assert is_serving(cluster.replicas[B])


def test_lagging_log_keeps_its_old_ballot() -> None:
    """A log follows a new primary only once it has all that the primary started from."""
    cluster = Replicas(b"ABC")
    cluster.change_view(view(1, b"ABC"))
    cluster.ask(A, SetKey, "k", b"1")
    replica = cluster.replicas[C]
    ballot, number = replica._log.log_ballot, replica.op_number
    replica.on_view_change(view(2, b"BC"), 0.0)
    new_ballot = ViewBallot(2, 1, b"nonce of B")
    (reply,) = replica.receive(B, AppendEntry(new_ballot, ballot, number + 2, 1, number + 1, ()), 0.0)
    assert reply == ReplicaSend(B, AppendAck(new_ballot, number, follows=False))
    replica.on_view_change(view(3, b"BC"), 0.0)
    replies = replica.receive(B, PrepareView(ViewBallot(3, 1, b"nonce of B"), ()), 0.0)
    promise = replies[0].message  # type: ignore[union-attr]
    assert isinstance(promise, ViewPromise)
    assert (promise.log_ballot, promise.op_number) == (ballot, number)


def test_restarted_replica_without_state_does_not_count_for_quorum() -> None:
    cluster = Replicas(b"ABC")
    first_view = view(1, b"ABC")
    cluster.change_view(first_view)
    cluster.ask(A, SetKey, "k", b"v")
    cluster.cut = {A, C}
    cluster.restart(B, first_view)
    cluster.cut = {A}
    cluster.change_view(view(2, b"CB"), B, C)
    assert not is_serving(cluster.replicas[C])
    assert cluster.replicas[C].wait_reason() == "the store waits for A, which may hold earlier writes"
    cluster.cut = set()
    cluster.change_view(view(3, b"CBA"))
    assert cluster.done(cluster.ask(B, GetKey, "k")).value == b"v", "A had it"


def test_lost_contents_are_reported_to_old_clients() -> None:
    cluster = Replicas(b"ABC")
    first_view = view(1, b"ABC")
    cluster.change_view(first_view)
    founding = cluster.done(cluster.ask(A, SetKey, "k", b"v")).founding
    for name in (A, B):
        cluster.restart(name, first_view)
    cluster.settle()
    cluster.change_view(view(2, b"CAB"))
    denied = cluster.answers[cluster.ask(C, GetKey, "k", founding=founding)]
    assert isinstance(denied, KvDenied)
    assert denied.reason == "lost"
    assert cluster.done(cluster.ask(C, GetKey, "k")).missing == ("k",), "a new client has no history"


def test_former_members_are_waited_for_only_a_while() -> None:
    cluster = Replicas(b"ABC")
    first_view = view(1, b"ABC")
    cluster.change_view(first_view)
    cluster.ask(A, SetKey, "k", b"v")
    cluster.cut = {A}
    cluster.restart(B, first_view)
    cluster.change_view(view(2, b"CB"), B, C)
    cluster.wait(3.0)
    assert not is_serving(cluster.replicas[C])
    cluster.wait(3.0)
    assert is_serving(cluster.replicas[C])
    assert cluster.done(cluster.ask(B, GetKey, "k")).missing == ("k",)


def test_restart_of_all_replicas_starts_empty_in_next_view() -> None:
    cluster = Replicas(b"ABC")
    first_view = view(1, b"ABC")
    cluster.change_view(first_view)
    cluster.ask(A, SetKey, "k", b"v")
    for name in (A, B, C):
        cluster.restart(name, first_view)
    cluster.settle()
    assert not any(is_serving(replica) for replica in cluster.replicas.values()), (
        "not in a view from before the restart"
    )
    cluster.change_view(view(2, b"ABC"))
    assert is_serving(cluster.replicas[A])


def test_forced_view_keeps_the_newest_log_of_its_members() -> None:
    cluster = Replicas(b"AB")
    cluster.change_view(view(1, b"AB"))
    founding = cluster.done(cluster.ask(B, SetKey, "k", b"v")).founding
    cluster.cut = {A}
    cluster.change_view(view((1 << 40) + 2, b"B", forced=True), B)
    assert cluster.done(cluster.ask(B, GetKey, "k", founding=founding)).value == b"v"


def test_joining_replica_fetches_large_snapshot_in_chunks() -> None:
    cluster = Replicas(b"ABC")
    cluster.change_view(view(1, b"AB"))
    for number in range(8):
        cluster.ask(A, SetKey, f"k{number}", bytes([number]) * 100_000)
    cluster.sent.clear()
    cluster.change_view(view(2, b"ABC"))
    chunks = [message for message in cluster.sent if isinstance(message, SnapshotChunk)]
    assert len(chunks) == 4
    assert all(len(chunk.data) <= CHUNK_BYTES for chunk in chunks)
    assert cluster.replicas[C]._log.store.to_snapshot() == cluster.replicas[A]._log.store.to_snapshot()
    cluster.sent.clear()
    cluster.change_view(view(3, b"ABC"))
    assert not [
        message for message in cluster.sent if isinstance(message, SnapshotChunk | SnapshotRequest)
    ], "all have it already"


def test_lagging_replica_gets_operations_or_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barnraise.kvstore.snapshot._LOG_LENGTH", 10)
    cluster = Replicas(b"ABC")
    cluster.change_view(view(1, b"ABC"))
    for many, kind in ((5, AppendEntry), (30, SnapshotChunk)):
        cluster.cut = {C}
        for _ in range(many):
            cluster.ask(A, AddToKey, "n", 1)
        cluster.cut = set()
        cluster.sent.clear()
        cluster.wait(1.0)
        assert cluster.replicas[C].op_number == cluster.replicas[A].op_number
        assert any(isinstance(message, kind) for message in cluster.sent)
        assert (kind is SnapshotChunk) == any(isinstance(message, SnapshotChunk) for message in cluster.sent)


def test_watch_ends_when_keys_exist_or_names_missing_keys() -> None:
    cluster = Replicas(b"ABC")
    cluster.change_view(view(1, b"ABC"))
    watch = cluster.ask(C, WatchKey, ("k", "l"), True)
    cluster.ask(A, SetKey, "l", b"2")
    assert watch not in cluster.answers
    cluster.ask(B, SetKey, "k", b"1")
    assert cluster.done(watch).values == (b"1", b"2"), "at once, not at the next look"
    late = cluster.ask(C, WatchKey, ("k", "never"), False, timeout=2.0)
    cluster.wait(2.5)
    assert cluster.done(late).missing == ("never",)
    assert cluster.replicas[C].wait_reason() is None
    forgotten = cluster.ask(C, WatchKey, ("other",), True)
    cluster.replicas[C].cancel(forgotten)
    cluster.ask(A, SetKey, "other", b"")
    cluster.wait(1.5)
    assert forgotten not in cluster.answers


def test_watch_survives_change_of_primary() -> None:
    cluster = Replicas(b"ABC")
    cluster.change_view(view(1, b"ABC"))
    watch = cluster.ask(C, WatchKey, ("k",), True)
    cluster.cut = {A}
    cluster.change_view(view(2, b"BC"), B, C)
    cluster.ask(B, SetKey, "k", b"v")
    assert cluster.done(watch).values == (b"v",)


def test_non_member_is_not_served() -> None:
    cluster = Replicas(b"AB")
    cluster.change_view(view(1, b"A"), A, B)
    ticket = cluster.ask(B, GetKey, "k", timeout=2.0)
    cluster.wait(1.5)
    assert cluster.replicas[B].wait_reason() == "this machine is not in the cluster now"
    forward = ForwardedRequest(b"", 1, GetKey(SCOPE, bytes(16), 1, b"", "k"))
    assert cluster.replicas[A].receive(B, forward, cluster.now) == []
    cluster.change_view(view(2, b"AB"))
    assert cluster.done(ticket).missing == ("k",)


def test_idle_namespace_is_dropped_after_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Replicas(b"AB")
    cluster.change_view(view(1, b"AB"))

    def write(run: str) -> Result:
        cluster.serial += 1
        operation = SetKey(Namespace(run, 1), bytes(16), cluster.serial, b"", "k", b"")
        cluster.perform(A, cluster.replicas[A].request(operation, cluster.serial, cluster.now))
        cluster.settle()
        return cluster.answers[cluster.serial]

    for number in range(64):
        write(f"run {number}")
        cluster.now += 1.0
    assert isinstance(write("another"), KvDenied)
    cluster.now += primary.IDLE_NAMESPACE_S - 62
    assert isinstance(write("another"), KvDone)
    stores = [cluster.replicas[name]._log.store for name in (A, B)]
    assert [Namespace("run 0", 1) in store.namespaces for store in stores] == [False, False]
    assert isinstance(write("yet another"), KvDone), "run 1 has been idle for long, too"


def promise(view: int = 0, number: int = 0, forgotten_until: int = 0) -> ViewPromise:
    return ViewPromise(
        NO_BALLOT, ViewBallot(view, 1, b"") if view else NO_BALLOT, number, forgotten_until, ()
    )


@pytest.mark.parametrize(
    ("replies", "is_overdue", "expected"),
    [
        ({A: promise(4, 7), B: promise(4, 9)}, False, UseOwnLog(B)),
        ({A: promise(4, 7), B: promise(3, 9)}, False, UseOwnLog(A)),
        ({A: promise(4, 7)}, False, WaitFor((B, C), 4)),
        ({A: promise(4, 7)}, True, WaitFor((B,), 4)),  # B is still a member and may have it
        ({A: promise(4, 7), B: promise(forgotten_until=4)}, False, WaitFor((C,), 4)),
        ({A: promise(4, 7), B: promise(forgotten_until=4)}, True, StartEmpty),
        ({A: promise(forgotten_until=4), B: promise(forgotten_until=4)}, False, StartEmpty),
        (
            {A: promise(2, 7), B: promise(2, 7)},
            False,
            WaitFor((C, D), 2),
        ),  # two of four without the most senior
        ({A: promise(2, 7), B: promise(2, 7), D: promise(2, 8)}, False, UseOwnLog(D)),
    ],
)
def test_choose_log_from_replies_of_past_views(
    replies: dict[bytes, ViewPromise], is_overdue: bool, expected: object
) -> None:
    known = {2: view(2, b"CABD"), 3: view(3, b"ABC"), 4: view(4, b"ABC"), 5: view(5, b"AB")}
    verdict = choose_log(known[5], replies, known, is_quorum, is_overdue=is_overdue)
    assert isinstance(verdict, StartEmpty) if expected is StartEmpty else verdict == expected


def test_unknown_past_view_is_asked_for_then_given_up() -> None:
    known = {5: view(5, b"AB"), 2: view(2, b"AB")}
    replies = {A: promise(2, 7)}
    assert choose_log(known[5], replies, known, is_quorum, is_overdue=False) == WaitFor((B,), 4)
    assert isinstance(choose_log(known[5], replies, known, is_quorum, is_overdue=True), StartEmpty)


def test_replica_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barnraise.kvstore.snapshot._LOG_BYTES", 10_000)
    log = ReplicaLog()
    for serial in range(100):
        log.apply(SetKey(SCOPE, bytes(16), serial, b"", "k", bytes(600)))
    assert (log.op_number, log.oldest_op) == (100, 91)
    assert len(log.since(95)) == 6


@given(st.binary(max_size=200))
def test_random_bytes_are_decoded_or_rejected(data: bytes) -> None:
    try:
        decode_message(data)
    except ProtocolError:
        pass


def test_messages_round_trip_through_encoding() -> None:
    operation = SetKey(SCOPE, bytes(16), 1, b"", "k", b"v")
    for message in (
        AppendEntry(NO_BALLOT, ViewBallot(1, 2, b"n"), 3, 1, 4, (operation,)),
        ViewPromise(NO_BALLOT, NO_BALLOT, 1, 2, (view(3, b"ABC"),)),
        SnapshotRequest(NO_BALLOT, b"t", 5, NO_BALLOT, 6),
    ):
        assert decode_message(encode_message(message)) == message
    with pytest.raises(ProtocolError):
        decode_message(bytes(3 << 20))


def reply(log: ViewBallot, op_number: int = 1, forgotten: int = 0) -> ViewPromise:
    return ViewPromise(NO_BALLOT, log, op_number, forgotten, ())


def durable_choice(
    new: ReplicaView,
    replies: dict[bytes, ViewPromise],
    *known: ReplicaView,
    removed: bytes = b"",
    is_overdue: bool = False,
) -> tuple[object, bool]:
    views = {past.number: past for past in (*known, new)}
    choice, lost = choose_durable_log(
        new, replies, views, is_quorum, lambda node: node[0] in removed, is_overdue=is_overdue
    )
    return choice, bool(lost)


OLD, NEW = ViewBallot(1, 1, b"a"), ViewBallot(2, 1, b"a")


def test_durable_store_waits_for_the_only_machine_with_the_newest_entries() -> None:
    """A was alone in view 2, and is off again: B and C have older entries."""
    replies = {B: reply(OLD), C: reply(OLD)}
    for is_overdue in (False, True):
        choice = durable_choice(
            view(3, b"BC"), replies, view(1, b"ABC"), view(2, b"A"), is_overdue=is_overdue
        )
        assert choice == (WaitFor((A,), 2), False)
    replies[A] = reply(NEW)
    assert durable_choice(view(4, b"BCA"), replies, view(2, b"A"), view(3, b"BC")) == (UseOwnLog(A), False)


def test_durable_store_does_not_wait_for_a_removed_machine() -> None:
    replies = {B: reply(OLD), C: reply(OLD, 5)}
    choice = durable_choice(view(3, b"BC"), replies, view(1, b"ABC"), view(2, b"A"), removed=b"A")
    assert choice == (UseOwnLog(C), True)


def test_durable_store_keeps_the_log_of_a_machine_when_another_lost_its_disk() -> None:
    """The senior machine of a pair has a new disk: the other one has the entries, and is no quorum."""
    replies = {A: reply(NO_BALLOT, 0, forgotten=1), B: reply(OLD, 9)}
    assert durable_choice(view(2, b"BA"), replies, view(1, b"AB")) == (UseOwnLog(B), True)


def test_durable_store_of_a_new_cluster_starts_empty() -> None:
    assert durable_choice(view(1, b"A"), {A: reply(NO_BALLOT, 0)}) == (StartEmpty(""), False)
    fresh = {A: reply(NO_BALLOT, 0, forgotten=70 << 24), B: reply(NO_BALLOT, 0, forgotten=70 << 24)}
    later = view((70 << 24) + 1, b"AB")
    assert isinstance(durable_choice(later, fresh)[0], WaitFor), "another machine may know the views between"
    assert durable_choice(later, fresh, is_overdue=True) == (StartEmpty(""), False)


def test_durable_store_follows_a_view_that_a_person_forced() -> None:
    replies = {B: reply(OLD, 3)}
    forced = view(9, b"BC", forced=True)
    assert durable_choice(forced, replies, view(2, b"A"))[0] == WaitFor((C,), 9)
    assert durable_choice(forced, replies, view(2, b"A"), is_overdue=True) == (UseOwnLog(B), False)


def test_durable_store_waits_for_the_machine_of_a_view_that_its_members_missed() -> None:
    """B was alone in view 2, met A and C in view 3, and died before they had its log."""
    rules = StoreRules(is_durable=True)
    cluster = Replicas(b"")
    cluster.replicas = {
        name: KvReplica(name, is_quorum, name * 16, name=bytes.decode, rules=rules) for name in (A, B, C)
    }
    cluster.change_view(view(1, b"BA"))
    cluster.change_view(view(2, b"B"))
    written = cluster.ask(B, SetKey, "k", b"newest")
    assert isinstance(cluster.answers[written], KvDone)
    cluster.cut = {B}
    assert (cluster.replicas[A].first_unknown_view, cluster.replicas[C].first_unknown_view) == (2, 1)
    cluster.replicas[A].on_view_change(view(3, b"BAC"), cluster.now, [view(2, b"B")])
    cluster.replicas[C].on_view_change(view(3, b"BAC"), cluster.now, [view(2, b"B"), view(1, b"BA")])
    cluster.change_view(view(4, b"AC"))
    cluster.wait(20.0)
    assert not is_serving(cluster.replicas[A])
    assert "waits for B" in str(cluster.replicas[A].wait_reason())
    cluster.cut = set()
    cluster.change_view(view(5, b"ACB"))
    cluster.wait(3.0)
    assert cluster.done(cluster.ask(C, GetKey, "k")).value == b"newest"


def test_durable_store_knows_more_views_than_a_message_has() -> None:
    """B was alone in view 2. The view changed a hundred times while A and C waited for it."""
    cluster = Replicas(b"")
    rules = StoreRules(is_durable=True)
    cluster.replicas = {name: KvReplica(name, is_quorum, name * 16, rules=rules) for name in (A, C)}
    cluster.change_view(view(1, b"AC"))
    cluster.cut = {B}
    for name in (A, C):
        cluster.replicas[name].on_view_change(view(3, b"AC"), 0.0, [view(2, b"B")])
    for number in range(4, 104):
        cluster.change_view(view(number, b"AC"))
    cluster.wait(20.0)
    assert not is_serving(cluster.replicas[A])
    change = cluster.replicas[A].unsaved()
    assert change is not None
    assert len(change.state.views) == 64
    assert all(len(message.known) <= 64 for message in cluster.sent if isinstance(message, PrepareView))


def test_unsaved_change_is_returned_once() -> None:
    rules = StoreRules(is_durable=True)
    replica = KvReplica(A, is_quorum, A * 16, rules=rules)
    replica.on_view_change(view(1, b"A"), 0.0)
    first = replica.unsaved()
    assert first is not None
    assert first.snapshot is not None, "an empty store replaces what the disk had"
    assert replica.unsaved() is None
    write, read = SetKey(SCOPE, A * 16, 1, b"", "k", b"v"), GetKey(SCOPE, A * 16, 2, b"", "k")
    replica.request(read, 1, 0.0)
    assert replica.unsaved() is None
    replica.request(write, 2, 0.0)
    change = replica.unsaved()
    assert change is not None
    assert (change.operations, change.snapshot) == (((3, write),), None)
    saved = SavedReplica(change.state, first.snapshot, change.operations)
    again = KvReplica(A, is_quorum, B * 16, last_view=1, rules=rules, saved=saved)
    assert again.unsaved() is None
    again.on_view_change(view(2, b"A"), 0.0)
    (answer,) = again.request(read, 3, 0.0)
    assert isinstance(answer, ReplicaAnswer)
    assert answer.result.value == b"v"  # type: ignore[union-attr]


def test_store_in_memory_collects_nothing_for_a_disk() -> None:
    cluster = Replicas(b"A")
    cluster.change_view(view(1, b"A"))
    cluster.ask(A, SetKey, "k", b"v")
    log = cluster.replicas[A]._log
    assert (log.unsaved, log.is_replaced) == ([], False)
