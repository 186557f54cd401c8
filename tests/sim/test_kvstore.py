"""Replicas of the key-value store under a fake clock and network: an answered operation is never lost.

Messages are delayed, lost, duplicated and reordered; machines freeze, crash and restart without their state.
Views change all the time, each decided by a quorum of the one before. Clients count, write, append and queue,
and retry operations without an answer. Durable replicas restart with their disks and never lose the store.
`pytest tests/sim/test_kvstore.py --seed N` replays one schedule.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from barnraise.agent_client.kv_messages import (
    AddToKey,
    AppendToKey,
    GetKey,
    KvDenied,
    KvDone,
    Namespace,
    Operation,
    PopFromQueue,
    PushToQueue,
    Result,
    SetKey,
    WatchKey,
)
from barnraise.kvstore.messages import (
    Effect,
    Message,
    ReplicaAnswer,
    ReplicaNote,
    ReplicaSend,
    ReplicaView,
    SavedReplica,
    UnsavedChange,
    decode_message,
    encode_message,
)
from barnraise.kvstore.primary import Primary
from barnraise.kvstore.replica import TICK_S, KvReplica
from barnraise.kvstore.store import IN_MEMORY, StoreRules

SCHEDULES = 300
SCOPE = Namespace("simulated", 3)
COUNTERS = ("first", "second")
FAULTS_S = 6.0
ON_DISK = StoreRules(is_durable=True)


def is_quorum(view: ReplicaView, agreeing: set[bytes]) -> bool:
    voters = [node for node in view.members if node in view.voters]
    yes = sum(node in agreeing for node in voters)
    return 2 * yes > len(voters) or (2 * yes == len(voters) > 0 and voters[0] in agreeing)


class Node:
    """Machine with its replica while it is up, and the state on its disk."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.replica: KvReplica | None = None
        self.boot = 0
        self.known_view = 0
        self.accepted = 0
        self.frozen_until = 0.0
        self.disk: SavedReplica | None = None

    def save(self, change: UnsavedChange | None) -> None:
        """Write a change to the disk of a durable replica."""
        if change is None:
            return
        before = self.disk if self.disk is not None and change.snapshot is None else None
        snapshot = change.snapshot or (before.snapshot if before is not None else b"")
        earlier = before.operations if before is not None else ()
        self.disk = SavedReplica(change.state, snapshot, (*earlier, *change.operations))


class ClientOperation:
    """One operation of a client, from the first attempt to its answer."""

    def __init__(self, operation: Operation | WatchKey, began: float) -> None:
        self.operation = operation
        self.began = began
        self.ended = float("inf")
        self.result: Result | None = None

    @property
    def done(self) -> KvDone | None:
        return self.result if isinstance(self.result, KvDone) else None


class Client:
    """Client that sends one operation after the other to its machine, and stops with the machine."""

    def __init__(self, simulation: KvSimulation, node: Node, number: int) -> None:
        self.simulation = simulation
        self.node = node
        self.boot = node.boot
        self.name = number.to_bytes(16, "big")
        self.number = number
        self.serial = 0
        self.version = 0
        self.founding = b""
        self.pending: ClientOperation | None = None
        self.ended = False

    def start(self) -> None:
        if self.is_dead or self.ended or self.pending is not None or self.simulation.quiet:
            return
        self.serial += 1
        self.pending = ClientOperation(self.choose_operation(), self.simulation.now)
        self.simulation.history.append(self.pending)
        self.send()

    @property
    def is_dead(self) -> bool:
        return self.node.boot != self.boot or self.node.replica is None

    def choose_operation(self) -> Operation | WatchKey:
        rng, head = self.simulation.rng, (SCOPE, self.name, self.serial, self.founding)
        draw = rng.random()
        if draw < 0.3:
            return AddToKey(*head, rng.choice(COUNTERS), 1)
        if draw < 0.5:
            self.version += 1
            return SetKey(*head, f"register {self.number}", str(self.version).encode())
        if draw < 0.75:
            return GetKey(*head, f"register {rng.choice(self.simulation.clients).number}")
        if draw < 0.83:
            return AppendToKey(*head, "list", f"{self.number}.{self.serial},".encode())
        if draw < 0.89:
            return PushToQueue(*head, "queue", f"{self.number}.{self.serial}".encode())
        if draw < 0.95:
            return PopFromQueue(*head, "queue")
        return WatchKey(*head, (f"register {rng.choice(self.simulation.clients).number}", "list"), True)

    def send(self) -> None:
        pending = self.pending
        if pending is None or self.is_dead:
            return
        timeout = 4.0 if isinstance(pending.operation, WatchKey) else 1.5
        assert self.node.replica is not None
        ticket = (self.number, self.serial)
        effects = self.node.replica.request(pending.operation, ticket, self.simulation.now, timeout)
        self.simulation.perform(self.node, effects)

    def answered(self, serial: int, result: Result) -> None:
        if self.pending is None or serial != self.serial:
            return
        if isinstance(result, KvDenied):
            if result.reason == "late":  # it may have happened or not: ask again, with the same serial
                self.simulation.at(self.simulation.now + 0.01, self.send)
                return
            assert result.reason == "lost", result
            self.ended = True
        else:
            assert not self.founding or result.founding == self.founding
            self.founding = result.founding
        self.pending.result, self.pending.ended = result, self.simulation.now
        self.pending = None
        self.simulation.at(self.simulation.now + self.simulation.rng.expovariate(12.0), self.start)


class KvSimulation:
    """Simulated cluster; ``harsh``: machines lose their memory instead of freezing only.

    ``durable``: the replicas are on disks.
    """

    def __init__(self, seed: int, *, harsh: bool, durable: bool = False) -> None:
        self.rng = random.Random(seed)
        self.harsh = harsh
        self.durable = durable
        self.now = 0.0
        self.calm = self.quiet = False
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.nodes = {
            name: Node(name) for name in (bytes([65 + i]) * 4 for i in range(self.rng.randint(2, 5)))
        }
        self.names = list(self.nodes)
        self.cuts: set[tuple[bytes, bytes]] = set()
        self.loss = self.rng.choice((0.0, 0.02, 0.1))
        self.pace = self.rng.choice((2.0, 4.0, 8.0))
        self.doubling = self.rng.choice((0.0, 0.05))
        self.history: list[ClientOperation] = []
        self.clients: list[Client] = []
        self.notes: list[str] = []
        self.boots: dict[int, dict[bytes, int]] = {}
        count = self.rng.randint(1, len(self.names))
        first = tuple(self.names[:count])
        self.views = {1: ReplicaView(1, first, frozenset(first))}
        self.boots[1] = dict.fromkeys(first, 1)
        for node in self.nodes.values():
            self.start_node(node)
        for number in range(self.rng.randint(3, 6)):
            self.add_client(number)
        self.at(0.0, self.inject_fault)

    # time

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), what))

    def run(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            self.now, _, what = heapq.heappop(self.events)
            what()
        self.now = until

    # machines

    def start_node(self, node: Node) -> None:
        node.boot += 1
        nonce = node.name + node.boot.to_bytes(12, "big")
        rules = ON_DISK if self.durable else IN_MEMORY
        node.replica = KvReplica(
            node.name, is_quorum, nonce, last_view=node.known_view, rules=rules, saved=node.disk
        )
        if node.known_view:
            self.change_view(node, node.replica, node.known_view)
        elif node.name in self.views[1].members:
            self.send_view(node, node.boot, 1)
        self.at(
            self.now + TICK_S * self.rng.random(),
            lambda boot=node.boot: self.tick(node, boot),
        )

    def tick(self, node: Node, boot: int) -> None:
        if node.boot != boot or node.replica is None:
            return
        if node.frozen_until <= self.now:
            self.perform(node, node.replica.tick(self.now))
        self.at(max(self.now, node.frozen_until) + TICK_S, lambda: self.tick(node, boot))

    def perform(self, node: Node, effects: list[Effect]) -> None:
        if self.durable and node.replica is not None:
            if self.harsh and not self.calm and self.rng.random() < 0.0005:
                node.replica = None  # before the disk has it
                return
            node.save(node.replica.unsaved(whole=self.rng.random() < 0.01))
            if self.harsh and not self.calm and self.rng.random() < 0.0005:
                node.replica = None  # the disk has it, but no message was sent
                return
        for effect in effects:
            if isinstance(effect, ReplicaSend):
                self.send(node.name, effect.to, effect.message)
            elif isinstance(effect, ReplicaAnswer):
                assert isinstance(effect.ticket, tuple)
                number, serial = effect.ticket
                self.clients[number].answered(serial, effect.result)
            else:
                assert isinstance(effect, ReplicaNote)
                self.notes.append(effect.text)

    def send(self, source: bytes, target: bytes, message: Message) -> None:
        rng = self.rng
        if (source, target) in self.cuts or rng.random() < self.loss:
            return
        if rng.random() < 0.03:
            assert decode_message(encode_message(message)) == message
        for _ in range(1 + (rng.random() < self.doubling)):
            delay = rng.expovariate(200.0) + (rng.random() < 0.03) * rng.uniform(0.05, 1.5)
            self.at(self.now + delay, lambda: self.deliver(source, target, message))

    def deliver(self, source: bytes, target: bytes, message: Message) -> None:
        node = self.nodes[target]
        if node.replica is None:
            return
        if node.frozen_until > self.now:
            self.at(node.frozen_until, lambda: self.deliver(source, target, message))
            return
        self.perform(node, node.replica.receive(source, message, self.now))

    # faults

    def inject_fault(self) -> None:
        if self.calm:
            return
        rng = self.rng
        draw = rng.random()
        node = self.nodes[rng.choice(self.names)]
        if draw < 0.35:
            self.decide(node)
        elif draw < 0.5:
            node.frozen_until = self.now + rng.uniform(0.1, 3.0)
        elif draw < 0.65:
            side = set(rng.sample(self.names, rng.randint(1, len(self.names))))
            pairs = itertools.permutations(self.names, 2)
            one_way = rng.random() < 0.3
            self.cuts = {
                (a, b)
                for a, b in pairs
                if (a in side) > (b in side) or (not one_way and (a in side) < (b in side))
            }
        elif draw < 0.8:
            self.cuts = set()
        elif draw < 0.87 and self.harsh:
            node.replica = None
        elif self.harsh:
            down = [candidate for candidate in self.nodes.values() if candidate.replica is None]
            if down:
                self.start_node(rng.choice(down))
        if sum(not client.is_dead for client in self.clients) < 4:
            self.add_client(len(self.clients))
        self.at(self.now + rng.expovariate(self.pace), self.inject_fault)

    def add_client(self, number: int) -> None:
        up = [node for node in self.nodes.values() if node.replica is not None]
        if up:
            client = Client(self, self.rng.choice(up), number)
            self.clients.append(client)
            self.at(self.now + self.rng.random(), client.start)

    def reaches(self, node: Node, peer: Node) -> bool:
        up = node.replica is not None and peer.replica is not None
        thawed = max(node.frozen_until, peer.frozen_until) <= self.now
        return up and thawed and not {(node.name, peer.name), (peer.name, node.name)} & self.cuts

    def decide(self, proposer: Node) -> None:
        """Decide the next view if a quorum of the last one takes part; reachable nodes learn of it later."""
        last = self.views[max(self.views)]
        around = [node for node in self.nodes.values() if self.reaches(proposer, node) or node is proposer]
        if proposer.replica is None or proposer.frozen_until > self.now:
            return
        if any(node.accepted == last.number for node in around):  # as Paxos would find out
            for node in around:
                self.send_view_soon(node, last.number)
        acceptors = [node for node in around if node.known_view == last.number]
        if not is_quorum(last, {node.name for node in acceptors}):
            return
        boots, here = self.boots[last.number], {node.name: node for node in around}
        stay = [name for name in last.members if name in here and here[name].boot == boots[name]]
        back = [name for name in here if name not in stay and (self.calm or self.rng.random() < 0.7)]
        members = (*stay, *self.rng.sample(back, len(back)))
        voters = {name for name in members if self.calm or name in last.voters or self.rng.random() < 0.9}
        if not voters:
            return
        number = last.number + 1
        self.views[number] = ReplicaView(number, members, frozenset(voters))
        self.boots[number] = {name: here[name].boot for name in members}
        for node in acceptors:
            node.accepted = number
        for node in around:
            self.send_view_soon(node, number)

    def send_view_soon(self, node: Node, number: int) -> None:
        delay = self.rng.expovariate(30.0) + (self.rng.random() < 0.1) * self.rng.random()
        self.at(self.now + delay, lambda boot=node.boot: self.send_view(node, boot, number))

    def send_view(self, node: Node, boot: int, number: int) -> None:
        if (
            node.replica is None
            or node.boot != boot
            or node.known_view >= number
            or node.frozen_until > self.now
        ):
            return
        node.known_view = node.accepted = number
        self.change_view(node, node.replica, number)

    def change_view(self, node: Node, replica: KvReplica, number: int) -> None:
        """Tell a replica a view; a durable one also those that it missed, as its machine knows the chain."""
        first = replica.first_unknown_view if self.durable else number
        earlier = [self.views[missed] for missed in range(max(first, 1), number)]
        self.perform(node, replica.on_view_change(self.views[number], self.now, earlier))

    # after the faults

    def end_faults(self) -> None:
        self.calm, self.cuts, self.loss, self.doubling = True, set(), 0.0, 0.0
        for node in self.nodes.values():
            node.frozen_until = 0.0
            if node.replica is None:
                self.start_node(node)
        for _ in self.nodes:
            self.add_client(len(self.clients))

    def settle(self) -> None:
        """Decide views as the membership does without faults, until all nodes are members."""
        for _ in range(12):
            last = max(self.views)
            if all(node.known_view == last for node in self.nodes.values()):
                boots = {node.name: node.boot for node in self.nodes.values()}
                if self.boots[last] == boots and self.views[last].voters == set(boots):
                    break
            newest = max(self.nodes.values(), key=lambda node: node.known_view)
            self.decide(newest)
            self.run(self.now + 0.8)

    def unanswered(self) -> list[ClientOperation]:
        calls = [client.pending for client in self.clients if client.pending and not client.is_dead]
        return [call for call in calls if not isinstance(call.operation, WatchKey)]


def check_answers(simulation: KvSimulation) -> None:
    """Check counters, single-writer registers and the queue, separately for each history of the store."""
    answers = [(call, call.done) for call in simulation.history if call.done is not None]
    for founding in {done.founding for _, done in answers if done is not None}:
        answered = [(call, done) for call, done in answers if done is not None and done.founding == founding]
        for key in COUNTERS:
            adds = [
                (a, d) for a, d in answered if isinstance(a.operation, AddToKey) and a.operation.key == key
            ]
            sums = [done.count for _, done in adds]
            assert len(set(sums)) == len(sums), f"two additions to {key} gave one sum: {sorted(sums)}"
            check_order((a.began, a.ended, done.count) for a, done in adds)
        writers = {a.operation.key for a, _ in answered if isinstance(a.operation, SetKey)}
        for key in writers:
            check_register(simulation, answered, key)
        popped = Counter(
            d.value for a, d in answered if isinstance(a.operation, PopFromQueue) and d.value is not None
        )
        assert not [value for value, count in popped.items() if count > 1]


def check_register(
    simulation: KvSimulation, answered: list[tuple[ClientOperation, KvDone]], key: str
) -> None:
    """Check that a read sees every write answered before its start, and no write from after its end."""
    seen: list[tuple[float, float, int]] = []
    for call, done in answered:
        operation = call.operation
        if isinstance(operation, SetKey) and operation.key == key:
            seen.append((call.began, call.ended, int(operation.value)))
        elif isinstance(operation, GetKey) and operation.key == key:
            seen.append((call.began, call.ended, int(done.value or 0)))
        elif isinstance(operation, WatchKey) and operation.keys[0] == key and done.values:
            seen.append((call.began, call.ended, int(done.values[0])))
    check_order(seen)
    written = sorted(
        a.began for a in simulation.history if isinstance(a.operation, SetKey) and a.operation.key == key
    )
    for _, ended, version in seen:
        assert bisect.bisect_right(written, ended) >= version, f"{key} was read before it was written"


def check_order(seen: Iterable[tuple[float, float, int]]) -> None:
    """Check that an operation that started after another's end has no smaller value."""
    rows = sorted(seen)
    ends = sorted((ended, value) for _, ended, value in rows)
    highest, place = -1, 0
    for began, _, value in rows:
        while place < len(ends) and ends[place][0] < began:
            highest = max(highest, ends[place][1])
            place += 1
        assert value >= highest, f"{value} was answered after {highest}"


def check_end(simulation: KvSimulation) -> None:
    """Check that the final store has every answered write of its history exactly once."""
    reader = Client(simulation, next(iter(simulation.nodes.values())), len(simulation.clients))
    simulation.clients.append(reader)
    reader.serial = 1
    names = [f"register {client.number}" for client in simulation.clients]
    finals: dict[str, bytes] = {}
    founding = b""
    for key in (*COUNTERS, "list", *names):
        reader.pending = call = ClientOperation(GetKey(SCOPE, reader.name, 1, b"", key), simulation.now)
        reader.send()
        timeout = simulation.now + 2.0
        while call.result is None and simulation.now < timeout:
            simulation.run(simulation.now + 0.02)
        assert call.done is not None, "the final state cannot be read"
        finals[key], founding = call.done.value or b"", call.done.founding
        reader.pending = None
    answered = [
        call for call in simulation.history if call.done is not None and call.done.founding == founding
    ]
    for key in COUNTERS:
        additions = [a for a in answered if isinstance(a.operation, AddToKey) and a.operation.key == key]
        asked_for = [
            a for a in simulation.history if isinstance(a.operation, AddToKey) and a.operation.key == key
        ]
        assert len(additions) <= int(finals[key] or 0) <= len(asked_for)
    tokens = Counter(finals["list"].split(b",")[:-1])
    assert not [token for token, count in tokens.items() if count > 1], "appended twice"
    for call in answered:
        if isinstance(call.operation, AppendToKey):
            assert call.operation.value[:-1] in tokens, "an answered append is gone"
        if isinstance(call.operation, SetKey):
            assert int(finals[call.operation.key] or 0) >= int(call.operation.value), (
                "an answered write is gone"
            )


def schedule(seed: int, *, durable: bool = False) -> KvSimulation:
    harsh = durable or seed % 3 != 0
    simulation = KvSimulation(seed, harsh=harsh, durable=durable)
    simulation.run(FAULTS_S)
    check_answers(simulation)
    simulation.end_faults()
    simulation.settle()
    simulation.quiet = True
    timeout = simulation.now + 8.0  # long enough to stop waiting for former members
    while simulation.unanswered() and simulation.now < timeout:
        simulation.run(simulation.now + 0.5)
    assert not simulation.unanswered(), "operations without an answer after the faults"
    check_answers(simulation)
    check_end(simulation)
    if durable or not harsh:
        foundings = {call.done.founding for call in simulation.history if call.done is not None}
        assert len(foundings) <= 1, "the store started empty although no replica lost its state"
        assert not simulation.notes
    return simulation


@pytest.mark.slow
@pytest.mark.parametrize("durable", [False, True], ids=["in memory", "on disks"])
def test_answered_operations_under_faults_are_never_lost(
    request: pytest.FixtureRequest, seeds: Callable[[int], Iterable[int]], durable: bool
) -> None:
    answered, tried = 0, list(seeds(SCHEDULES))
    for seed in tried:
        try:
            simulation = schedule(seed, durable=durable)
        except Exception as error:
            error.add_note(f"again: pytest tests/sim/test_kvstore.py --seed {seed}")
            raise
        answered += sum(call.done is not None for call in simulation.history)
    assert request.config.getoption("--seed") is not None or answered > 50 * len(tried)


def test_answer_before_quorum_is_detected_by_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove that the checks can fail, with a primary that does not wait for its backups."""
    monkeypatch.setattr(Primary, "_quorum_op_number", lambda primary, is_quorum: primary._log.op_number)
    for seed in range(SCHEDULES):
        try:
            schedule(seed)
        except AssertionError:
            return
    pytest.fail("nothing was noticed")


def test_message_before_disk_is_detected_by_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove that the checks can fail, with disks that lack the newest change when the messages leave."""

    def save_late(node: Node, change: UnsavedChange | None, save: Callable[..., None] = Node.save) -> None:
        save(node, node.__dict__.pop("late", None))
        if change is not None:
            node.__dict__["late"] = change

    monkeypatch.setattr(Node, "save", save_late)
    for seed in range(SCHEDULES):
        try:
            schedule(seed, durable=True)
        except AssertionError:
            return
    pytest.fail("nothing was noticed")
