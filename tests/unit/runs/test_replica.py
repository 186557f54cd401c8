"""Copies of the board in single steps: who answers, who counts, and what is said when nobody can."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import ProtocolError
from barnraise.local.board_messages import Add, Denied, Done, Get, Operation, Result, Scope, Set, Watch
from barnraise.runs import leading
from barnraise.runs.copies import Copy
from barnraise.runs.gathering import Found, Take, Wait, judge
from barnraise.runs.replica import Replica
from barnraise.runs.replication import (
    CHUNK_BYTES,
    NOBODY,
    Answer,
    Ballot,
    Chunk,
    Effect,
    Fetch,
    Forward,
    Gather,
    Held,
    Message,
    Prepare,
    Promise,
    ReplicaView,
    Send,
    decode_message,
    encode_message,
)
from tests.unit.changed_bytes import changed, read_or_refused
from tests.unit.runs.board_server import is_quorum

A, B, C, D = b"A", b"B", b"C", b"D"
SCOPE = Scope("run", 1)


def view(number: int, members: bytes, *, forced: bool = False) -> ReplicaView:
    nodes = tuple(bytes([one]) for one in members)
    return ReplicaView(number, nodes, frozenset(nodes), forced)


class House:
    """Copies that hear each other at once, unless they are cut off."""

    def __init__(self, names: bytes) -> None:
        self.now = 0.0
        self.copies = {bytes([one]): self.start(bytes([one])) for one in names}
        self.cut: set[bytes] = set()
        self.answers: dict[object, Result] = {}
        self.mail: deque[tuple[bytes, Send]] = deque()
        self.sent: list[Message] = []
        self.serial = 0

    def start(self, name: bytes, last_view: int = 0, life: int = 0) -> Replica:
        return Replica(name, is_quorum, name * 8 + bytes([life]) * 8, last_view=last_view, name=bytes.decode)

    def restart(self, name: bytes, last: ReplicaView) -> None:
        self.copies[name] = self.start(name, last.number, life=last.number)
        self.perform(name, self.copies[name].view_changed(last, self.now))

    def perform(self, name: bytes, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.mail.append((name, effect))
            elif isinstance(effect, Answer):
                assert effect.ticket not in self.answers, "answered twice"
                self.answers[effect.ticket] = effect.result

    def settle(self) -> None:
        while self.mail:
            sender, send = self.mail.popleft()
            if not {sender, send.to} & self.cut:
                self.sent.append(send.message)
                self.perform(send.to, self.copies[send.to].receive(sender, send.message, self.now))

    def tell(self, new: ReplicaView, *names: bytes) -> None:
        for name in names or new.members:
            self.perform(name, self.copies[name].view_changed(new, self.now))
        self.settle()

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            for name, copy in self.copies.items():
                if name not in self.cut:
                    self.perform(name, copy.tick(self.now))
            self.settle()

    def ask(
        self, at: bytes, kind: type, *fields: object, patience: float = 30.0, founding: bytes = b""
    ) -> object:
        self.serial += 1
        operation: Operation = kind(SCOPE, at * 16, self.serial, founding, *fields)
        self.perform(at, self.copies[at].request(operation, self.serial, self.now, patience))
        self.settle()
        return self.serial

    def done(self, ticket: object) -> Done:
        result = self.answers[ticket]
        assert isinstance(result, Done), result
        return result


def test_one_machine_alone_serves_at_once() -> None:
    house = House(b"A")
    house.tell(view(1, b"A"))
    assert house.copies[A].serves
    assert house.done(house.ask(A, Add, "n", 1)).count == 1


def test_everyone_holds_what_was_answered() -> None:
    house = House(b"ABC")
    house.tell(view(1, b"ABC"))
    for name in (A, B, C):
        house.ask(name, Set, f"by {name.decode()}", b"")
    assert len({copy.number for copy in house.copies.values()}) == 1
    assert all(copy._copy.board.has(SCOPE, "by A") for copy in house.copies.values())


def test_no_quorum_no_answer_and_the_missing_are_named() -> None:
    house = House(b"ABC")
    house.tell(view(1, b"ABC"))
    house.cut = {B, C}
    for kind, fields in ((Set, ("k", b"")), (Get, ("k",))):
        ticket = house.ask(A, kind, *fields, patience=3.0)
        assert ticket not in house.answers, "not even a read"
        house.wait(2.0)
        assert house.copies[A].waiting() == "too few of view 1 hold it; the board waits for B, C"
        house.wait(1.5)
        late = house.answers[ticket]
        assert isinstance(late, Denied)
        assert (late.reason, "waits for B, C" in late.message) == ("late", True)
    ticket = house.ask(B, Get, "k", patience=3.0)
    house.cut = {A}
    house.wait(4.0)
    assert "waits for A, which keeps it in view 1" in str(house.answers[ticket])


def test_half_with_the_most_senior_is_enough() -> None:
    house = House(b"AB")
    house.tell(view(1, b"AB"))
    house.cut = {B}
    assert house.done(house.ask(A, Add, "n", 1)).count == 1


def test_a_primary_that_was_replaced_answers_nothing() -> None:
    house = House(b"ABC")
    house.tell(view(1, b"ABC"))
    house.ask(A, Set, "k", b"old")
    house.cut = {A}
    house.tell(view(2, b"BC"), B, C)
    house.ask(B, Set, "k", b"new")
    house.cut = set()
    reading = house.ask(A, Get, "k")
    house.wait(1.0)
    assert reading not in house.answers
    house.tell(view(3, b"BCA"))
    assert house.done(reading).value == b"new"


def test_what_was_under_way_is_done_once_in_the_next_view() -> None:
    house = House(b"ABC")
    house.tell(view(1, b"ABC"))
    ticket = house.ask(C, Add, "n", 1)
    assert house.done(ticket).count == 1
    house.cut = {A}
    ticket = house.ask(C, Add, "n", 1)
    assert ticket not in house.answers
    house.tell(view(2, b"BC"), B, C)
    assert house.done(ticket).count == 2
    assert house.copies[B].serves


def test_a_copy_that_lags_does_not_pass_for_a_newer_one() -> None:
    """It belongs to the new reign only once it has all that the reign began with."""
    house = House(b"ABC")
    house.tell(view(1, b"ABC"))
    house.ask(A, Set, "k", b"1")
    copy = house.copies[C]
    held, number = copy._copy.held, copy.number
    copy.view_changed(view(2, b"BC"), 0.0)
    ballot = Ballot(2, 1, b"nonce of B")
    (said,) = copy.receive(B, Prepare(ballot, held, number + 2, 1, number + 1, ()), 0.0)
    assert said == Send(B, Held(ballot, number, follows=False))
    copy.view_changed(view(3, b"BC"), 0.0)
    replies = copy.receive(B, Gather(Ballot(3, 1, b"nonce of B"), ()), 0.0)
    promise = replies[0].message  # type: ignore[union-attr]
    assert isinstance(promise, Promise)
    assert (promise.held, promise.number) == (held, number)


def test_who_came_back_with_nothing_does_not_count_until_it_has_the_board() -> None:
    house = House(b"ABC")
    one = view(1, b"ABC")
    house.tell(one)
    house.ask(A, Set, "k", b"v")
    house.cut = {A, C}
    house.restart(B, one)
    house.cut = {A}
    house.tell(view(2, b"CB"), B, C)
    assert not house.copies[C].serves
    assert house.copies[C].waiting() == "the board waits for A: they may hold what was written before view 2"
    house.cut = set()
    house.tell(view(3, b"CBA"))
    assert house.done(house.ask(B, Get, "k")).value == b"v", "A had it"


def test_lost_memory_is_said_and_never_hidden() -> None:
    house = House(b"ABC")
    one = view(1, b"ABC")
    house.tell(one)
    founding = house.done(house.ask(A, Set, "k", b"v")).founding
    for name in (A, B):
        house.restart(name, one)
    house.settle()
    house.tell(view(2, b"CAB"))
    denied = house.answers[house.ask(C, Get, "k", founding=founding)]
    assert isinstance(denied, Denied)
    assert denied.reason == "lost"
    assert house.done(house.ask(C, Get, "k")).missing == ("k",), "who knew nothing of it begins anew"


def test_those_who_left_are_not_waited_for_for_ever() -> None:
    house = House(b"ABC")
    one = view(1, b"ABC")
    house.tell(one)
    house.ask(A, Set, "k", b"v")
    house.cut = {A}
    house.restart(B, one)
    house.tell(view(2, b"CB"), B, C)
    house.wait(3.0)
    assert not house.copies[C].serves
    house.wait(3.0)
    assert house.copies[C].serves
    assert house.done(house.ask(B, Get, "k")).missing == ("k",)


def test_a_whole_house_that_was_restarted_begins_anew_at_once() -> None:
    house = House(b"ABC")
    one = view(1, b"ABC")
    house.tell(one)
    house.ask(A, Set, "k", b"v")
    for name in (A, B, C):
        house.restart(name, one)
    house.settle()
    assert not any(copy.serves for copy in house.copies.values()), "nobody reigns in a view of its past life"
    house.tell(view(2, b"ABC"))
    assert house.copies[A].serves


def test_by_a_persons_word_the_rest_goes_on_with_what_it_has() -> None:
    house = House(b"AB")
    house.tell(view(1, b"AB"))
    founding = house.done(house.ask(B, Set, "k", b"v")).founding
    house.cut = {A}
    house.tell(view((1 << 40) + 2, b"B", forced=True), B)
    assert house.done(house.ask(B, Get, "k", founding=founding)).value == b"v"


def test_a_newcomer_fetches_a_large_board_in_pieces() -> None:
    house = House(b"ABC")
    house.tell(view(1, b"AB"))
    for number in range(8):
        house.ask(A, Set, f"k{number}", bytes([number]) * 100_000)
    house.sent.clear()
    house.tell(view(2, b"ABC"))
    chunks = [message for message in house.sent if isinstance(message, Chunk)]
    assert len(chunks) == 4
    assert all(len(chunk.data) <= CHUNK_BYTES for chunk in chunks)
    assert house.copies[C]._copy.board.image() == house.copies[A]._copy.board.image()
    house.sent.clear()
    house.tell(view(3, b"ABC"))
    assert not [message for message in house.sent if isinstance(message, Chunk | Fetch)], (
        "all have it already"
    )


def test_a_lagging_copy_gets_the_operations_or_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barnraise.runs.copies._LOG_LENGTH", 10)
    house = House(b"ABC")
    house.tell(view(1, b"ABC"))
    for many, kind in ((5, Prepare), (30, Chunk)):
        house.cut = {C}
        for _ in range(many):
            house.ask(A, Add, "n", 1)
        house.cut = set()
        house.sent.clear()
        house.wait(1.0)
        assert house.copies[C].number == house.copies[A].number
        assert any(isinstance(message, kind) for message in house.sent)
        assert (kind is Chunk) == any(isinstance(message, Chunk) for message in house.sent)


def test_a_watch_ends_when_the_key_comes_and_says_what_did_not() -> None:
    house = House(b"ABC")
    house.tell(view(1, b"ABC"))
    watch = house.ask(C, Watch, ("k", "l"), True)
    house.ask(A, Set, "l", b"2")
    assert watch not in house.answers
    house.ask(B, Set, "k", b"1")
    assert house.done(watch).values == (b"1", b"2"), "at once, not at the next look"
    late = house.ask(C, Watch, ("k", "never"), False, patience=2.0)
    house.wait(2.5)
    assert house.done(late).missing == ("never",)
    assert house.copies[C].waiting() is None
    forgotten = house.ask(C, Watch, ("other",), True)
    house.copies[C].forget(forgotten)
    house.ask(A, Set, "other", b"")
    house.wait(1.5)
    assert forgotten not in house.answers


def test_a_watch_outlives_the_primary() -> None:
    house = House(b"ABC")
    house.tell(view(1, b"ABC"))
    watch = house.ask(C, Watch, ("k",), True)
    house.cut = {A}
    house.tell(view(2, b"BC"), B, C)
    house.ask(B, Set, "k", b"v")
    assert house.done(watch).values == (b"v",)


def test_who_is_not_a_member_is_not_served() -> None:
    house = House(b"AB")
    house.tell(view(1, b"A"), A, B)
    ticket = house.ask(B, Get, "k", patience=2.0)
    house.wait(1.5)
    assert house.copies[B].waiting() == "this machine is not in view 1 of the cluster"
    forward = Forward(b"", 1, Get(SCOPE, bytes(16), 1, b"", "k"))
    assert house.copies[A].receive(B, forward, house.now) == []
    house.tell(view(2, b"AB"))
    assert house.done(ticket).missing == ("k",)


def test_an_idle_scope_makes_room_after_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(b"AB")
    house.tell(view(1, b"AB"))

    def write(run: str) -> Result:
        house.serial += 1
        operation = Set(Scope(run, 1), bytes(16), house.serial, b"", "k", b"")
        house.perform(A, house.copies[A].request(operation, house.serial, house.now))
        house.settle()
        return house.answers[house.serial]

    for number in range(64):
        write(f"run {number}")
        house.now += 1.0
    assert isinstance(write("another"), Denied)
    house.now += leading.IDLE_S - 62
    assert isinstance(write("another"), Done)
    boards = [house.copies[name]._copy.board for name in (A, B)]
    assert [Scope("run 0", 1) in board.scopes for board in boards] == [False, False]
    assert isinstance(write("yet another"), Done), "run 1 has been idle for long, too"


def promise(held: int = 0, number: int = 0, blind: int = 0) -> Promise:
    return Promise(NOBODY, Ballot(held, 1, b"") if held else NOBODY, number, blind, ())


@pytest.mark.parametrize(
    ("replies", "impatient", "expected"),
    [
        ({A: promise(4, 7), B: promise(4, 9)}, False, Take(B)),
        ({A: promise(4, 7), B: promise(3, 9)}, False, Take(A)),
        ({A: promise(4, 7)}, False, Wait((B, C), 4)),
        ({A: promise(4, 7)}, True, Wait((B,), 4)),  # B is still a member and may have it
        ({A: promise(4, 7), B: promise(blind=4)}, False, Wait((C,), 4)),
        ({A: promise(4, 7), B: promise(blind=4)}, True, Found),
        ({A: promise(blind=4), B: promise(blind=4)}, False, Found),
        ({A: promise(2, 7), B: promise(2, 7)}, False, Wait((C, D), 2)),  # two of four without the most senior
        ({A: promise(2, 7), B: promise(2, 7), D: promise(2, 8)}, False, Take(D)),
    ],
)
def test_what_a_new_primary_concludes(
    replies: dict[bytes, Promise], impatient: bool, expected: object
) -> None:
    known = {2: view(2, b"CABD"), 3: view(3, b"ABC"), 4: view(4, b"ABC"), 5: view(5, b"AB")}
    verdict = judge(known[5], replies, known, is_quorum, impatient=impatient)
    assert isinstance(verdict, Found) if expected is Found else verdict == expected


def test_a_view_that_nobody_knows_is_asked_for_then_given_up() -> None:
    known = {5: view(5, b"AB"), 2: view(2, b"AB")}
    replies = {A: promise(2, 7)}
    assert judge(known[5], replies, known, is_quorum, impatient=False) == Wait((B,), 4)
    assert isinstance(judge(known[5], replies, known, is_quorum, impatient=True), Found)


def test_the_log_of_a_copy_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barnraise.runs.copies._LOG_BYTES", 10_000)
    copy = Copy()
    for serial in range(100):
        copy.apply(Set(SCOPE, bytes(16), serial, b"", "k", bytes(600)))
    assert (copy.number, copy.oldest) == (100, 91)
    assert len(copy.since(95)) == 6


OPERATION = Set(SCOPE, bytes(16), 1, b"", "k", b"v")
MESSAGES = (
    Prepare(NOBODY, Ballot(1, 2, b"n"), 3, 1, 4, (OPERATION,)),
    Promise(NOBODY, NOBODY, 1, 2, (view(3, b"ABC"),)),
    Fetch(NOBODY, b"t", 5, NOBODY, 6),
)


@given(st.binary(max_size=200) | changed([encode_message(one) for one in MESSAGES]))
def test_messages_of_a_peer_with_changed_bytes_are_read_or_refused(data: bytes) -> None:
    read_or_refused(data, decode_message, encode_message, ProtocolError)


def test_messages_survive_the_wire() -> None:
    for message in MESSAGES:
        assert decode_message(encode_message(message)) == message
    with pytest.raises(ProtocolError):
        decode_message(bytes(3 << 20))
