"""Whole cluster on a fake clock, network and disk: only the membership code is real.

Every run is a function of its seed. Messages are delayed, lost, doubled and reordered. Nodes crash in the
middle of their effects, restart and stall. Links are cut in either direction.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from barnraise.identity import NodeKey
from barnraise.identity.trust import Role, TrustLog, decode_entry, encode_entry
from barnraise.membership.consensus.certificate import CertifiedDecision
from barnraise.membership.consensus.paxos import AcceptorState, founded
from barnraise.membership.effects import Effect, LogNote, SaveState, SendMessage, ViewChanged
from barnraise.membership.history import StoredHistory
from barnraise.membership.node import TICK_S, MembershipNode
from barnraise.membership.view import MembershipView, PresentMember, decide, first, nowhere
from benchmarks.simulation.fake_clock import FakeClock


@lru_cache
def keys(count: int) -> tuple[NodeKey, ...]:
    """Return keys that are the same in every process, so that a seed determines a run."""
    seeds = [hashlib.sha256(f"simulated node {index}".encode()).digest() for index in range(count)]
    return tuple(NodeKey(Ed25519PrivateKey.from_private_bytes(seed)) for seed in seeds)


@lru_cache
def trust_log(count: int, guests: int = 0) -> TrustLog:
    """Return a trust log in which the first node admits all others, the last ``guests`` as guests."""
    all_keys = keys(count)
    log = TrustLog.found(all_keys[0], "node 0")
    for index, key in enumerate(all_keys[1:], 1):
        role: Role = "guest" if index >= count - guests else "owner"
        log = log.extended(log.admit(all_keys[0], key.id, role, f"node {index}"))
    return log


@lru_cache
def _read_log(entries: tuple[bytes, ...]) -> TrustLog:
    return TrustLog.read(decode_entry(entry) for entry in entries)


def _incarnation(index: int, life: int) -> bytes:
    return index.to_bytes(8, "big") + life.to_bytes(8, "big")


@lru_cache
def _formed_record(count: int, guests: int) -> AcceptorState:
    """Return the view of a cluster in which every node is in its first life."""
    members = [
        PresentMember(key.id.raw, _incarnation(index, 1), votes=index < count - guests)
        for index, key in enumerate(keys(count))
    ]
    view = MembershipView(tuple(members), len(trust_log(count, guests).entries), ())
    return founded(decide(None, bytes(32), view))


@dataclass
class Disk:
    """Content that a node has synced to disk."""

    record: AcceptorState
    entries: list[bytes]
    chain: list[CertifiedDecision] = field(default_factory=list)
    removed: set[bytes] = field(default_factory=set)

    def save(self, state: SaveState) -> None:
        """Write what a node asks to save."""
        self.record = state.record
        if state.log_from is not None:
            del self.entries[state.log_from :]
            self.entries += state.entries
        if state.links:
            first = state.links[0].decision.number
            self.chain = [link for link in self.chain if link.decision.number < first]
            self.chain += state.links
        self.removed |= state.removed

    def stored(self) -> StoredHistory:
        """Return what a node reads when it starts."""
        log = _read_log(tuple(self.entries))
        return StoredHistory(self.record, log, tuple(self.chain), frozenset(self.removed))


def _disk(record: AcceptorState, entries: list[bytes]) -> Disk:
    chain = [CertifiedDecision(record.decided)] if record.decided.number else []
    return Disk(record, list(entries), chain)


@dataclass
class Node:
    """A machine: its disk stays, its member comes and goes."""

    index: int
    key: NodeKey
    disk: Disk
    member: MembershipNode | None = None
    life: int = 0
    asleep_until: float = 0.0
    waiting: list[tuple[Callable[..., list[Effect]], tuple[object, ...]]] = field(default_factory=list)

    @property
    def raw(self) -> bytes:
        return self.key.id.raw


class Violation(AssertionError):
    """Something happened that must never happen."""


class Cluster(FakeClock):
    """Nodes, the wires between them, and the assertions."""

    def __init__(self, seed: int, count: int, *, guests: int = 0, formed: bool = True) -> None:
        super().__init__(100.0)
        self.rng = random.Random(seed)
        self.seed = seed
        log = trust_log(count, guests)
        entries = [encode_entry(entry) for entry in log.entries]
        ids = [key.id.raw for key in keys(count)]
        blank = founded(nowhere())
        start = _formed_record(count, guests) if formed else founded(first(ids[0], bytes(16), len(entries)))
        self.nodes = [
            Node(index, key, _disk(start if formed or index == 0 else blank, entries))
            for index, key in enumerate(keys(count))
        ]
        self.by_raw = {node.raw: node for node in self.nodes}
        self.cut: set[tuple[int, int]] = set()
        self.loss = self.doubled = 0.0
        self.delay = (0.0005, 0.003)
        self.decided: dict[tuple[int, int], bytes] = {}
        self.messages: Counter[int] = Counter()
        self.notes: list[tuple[float, int, str]] = []
        self.history: list[tuple[float, int, tuple[int, int], str]] = []
        self.on_changed: Callable[[Node], None] | None = None
        for node in self.nodes:
            self.start(node)

    # the world

    def start(self, node: Node) -> None:
        if node.member is not None:
            return
        node.life += 1
        me = PresentMember(node.raw, _incarnation(node.index, node.life))
        rng = random.Random(self.rng.random())
        node.member = MembershipNode(me, node.key, node.disk.stored(), rng, self.now)
        node.waiting = []
        self._tick(node, node.life)
        for other in self.nodes:
            if other is not node and other.member is not None:
                self.link(node, other)

    def link(self, node: Node, other: Node) -> None:
        for here, there in ((node, other), (other, node)):
            if here.member is not None and not self.is_cut(node, other):
                self._do(here, here.member.link_up, there.raw)

    def crash(self, node: Node, *, refuses: bool = True) -> None:
        """Stop a node and keep its disk. ``refuses``: its machine is on and refuses connections."""
        node.member = None
        for other in self.nodes:
            if refuses and other.member is not None and not self.is_cut(node, other):
                other.member.link_down(node.raw)
        if refuses:
            for other in self.nodes:
                if other.member is not None and not self.is_cut(node, other):
                    delay = self.rng.uniform(0.01, 0.3)
                    self.later(delay, partial(self._refused, other, node, node.life))

    def _refused(self, other: Node, node: Node, life: int) -> None:
        if other.member is not None and node.member is None and node.life == life:
            self._do(other, other.member.connection_refused, node.raw)

    def leave(self, node: Node) -> None:
        if node.member is not None:
            self._do(node, node.member.leave)

    def stay(self, node: Node) -> None:
        if node.member is not None:
            self._do(node, node.member.cancel_leave)

    def end(self, node: Node, life: int) -> None:
        """End a node in order, after its goodbye."""
        if node.life == life and node.member is not None and node.member.leaving:
            self.crash(node)

    def perform(self, node: Node, event: Callable[..., list[Effect]], *arguments: object) -> None:
        """Perform an event that the test chooses."""
        self._do(node, event, *arguments)

    def wish(self, node: Node, entry: bytes) -> None:
        if node.member is not None:
            self._do(node, node.member.propose_entry, entry)

    def rotate(self, node: Node, new: NodeKey) -> None:
        """Let a node change its key, as an agent does.

        It asks for the decision until another owner says that the old key is out. Then it starts again.
        """
        self.by_raw[new.id.raw] = node
        if node.member is not None and node.asleep_until <= self.now:
            log = node.member.log
            if self._is_rotated(node, new):
                self.crash(node)
                node.key = new
                self.start(node)
                return
            if log.role(node.key.id) is not None:
                self.wish(node, encode_entry(log.rotate(node.key, new)))
        self.later(0.5, lambda: self.rotate(node, new))

    def _is_rotated(self, node: Node, new: NodeKey) -> bool:
        """Return True if another owner says that the old key is out, or if there is no other owner."""
        assert node.member is not None
        log = node.member.log
        others = [self.by_raw[owner.raw] for owner in log.owners if self.by_raw[owner.raw] is not node]
        reachable = [other for other in others if other.member is not None and not self.is_cut(node, other)]
        known = [log] if not others else [other.member.log for other in reachable if other.member is not None]
        return any(each.role(new.id) is not None for each in known)

    def stall(self, node: Node, seconds: float) -> None:
        node.asleep_until = max(node.asleep_until, self.now + seconds)

    def is_alive(self, node: Node, life: int) -> bool:
        return node.life == life and node.member is not None

    def is_cut(self, node: Node, other: Node) -> bool:
        return (node.index, other.index) in self.cut or (other.index, node.index) in self.cut

    def split(self, *sides: list[int]) -> None:
        """Split the network: nodes on different sides cannot reach each other."""
        self.cut = {(a, b) for x in sides for y in sides if x is not y for a in x for b in y}

    def heal(self) -> None:
        self.cut = set()
        self.loss = self.doubled = 0.0
        self.delay = (0.0005, 0.003)

    # time

    def _tick(self, node: Node, life: int) -> None:
        if node.life != life or node.member is None:
            return
        self._do(node, node.member.tick)
        if node.member is not None:
            self.later(TICK_S, lambda: self._tick(node, life))

    def _do(self, node: Node, event: Callable[..., list[Effect]], *arguments: object) -> None:
        if node.asleep_until > self.now:
            if not node.waiting:
                self.later(node.asleep_until - self.now, partial(self._wake, node, node.life))
            if event.__name__ != "tick" or not any(entry[0] == event for entry in node.waiting):
                node.waiting.append((event, arguments))
            return
        self._perform(node, event(*arguments, self.now))

    def _wake(self, node: Node, life: int) -> None:
        if node.life != life or node.member is None:
            return
        if node.asleep_until > self.now:
            self.later(node.asleep_until - self.now, lambda: self._wake(node, life))
            return
        waiting, node.waiting = node.waiting, []
        for event, arguments in waiting:
            if self.is_alive(node, life):  # it may crash in the middle
                self._perform(node, event(*arguments, self.now))

    crash_in_effects = 0.0

    def _perform(self, node: Node, effects: list[Effect]) -> None:
        for effect in effects:
            if self.crash_in_effects and self.rng.random() < self.crash_in_effects:
                self.crash(node)
                return
            match effect:
                case SaveState():
                    node.disk.save(effect)
                case SendMessage():
                    self._send(node, effect)
                case ViewChanged():
                    self._changed(node, effect)
                case LogNote():
                    self.notes.append((self.now, node.index, effect.text))

    def _send(self, node: Node, effect: SendMessage) -> None:
        other, sender = self.by_raw[effect.to], node.raw
        self.messages[node.index] += 1
        if (node.index, other.index) in self.cut or other.member is None or effect.to != other.raw:
            return
        if self.loss and self.rng.random() < self.loss:
            return
        copies = 2 if self.doubled and self.rng.random() < self.doubled else 1
        for _ in range(copies):
            self.later(self.rng.uniform(*self.delay), lambda: self._deliver(node, other, effect, sender))

    def _deliver(self, node: Node, other: Node, effect: SendMessage, sender: bytes) -> None:
        if sender == node.raw and effect.to == other.raw:  # links end with the keys of both ends
            self._arrive(node, other, effect)

    def _arrive(self, node: Node, other: Node, effect: SendMessage) -> None:
        if other.member is not None and (node.index, other.index) not in self.cut:
            self._do(other, other.member.receive, node.raw, effect.message)

    # what must hold

    def _changed(self, node: Node, effect: ViewChanged) -> None:
        assert node.member is not None
        record = node.member.record
        position = record.decided.position
        self.history.append((self.now, node.index, position, effect.why))
        known = self.decided.setdefault(position, record.digest)
        if known != record.digest:
            raise Violation(f"seed {self.seed}: two views {position} at {self.now:.3f}")
        if node.disk.record.decided.position != position:
            raise Violation(f"seed {self.seed}: node {node.index} acts on a view that is not on its disk")
        if self.on_changed is not None:
            self.on_changed(node)

    def agreed(self) -> bool:
        """Return True if all running nodes share one view of exactly these nodes and one coordinator."""
        live = [node.member for node in self.nodes if node.member is not None]
        if not live or len({member.record.digest for member in live}) != 1:
            return False
        if {member.me.node for member in live} != set(live[0].view.nodes):
            return False
        firsts = {member.coordinator(self.now)[0] for member in live}
        return len(firsts) == 1 and all(member.is_member for member in live)
