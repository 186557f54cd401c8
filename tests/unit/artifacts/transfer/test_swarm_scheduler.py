"""Swarm scheduler: every piece arrives despite lost links, and the source sends each about once."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.artifacts.store.manifest import PIECE
from barnraise.artifacts.transfer import swarm_scheduler
from barnraise.artifacts.transfer.messages import PieceName
from barnraise.artifacts.transfer.swarm_scheduler import (
    AskPeer,
    PeerDistrusted,
    PeerDown,
    PeerUp,
    PiecePromised,
    PieceReceived,
    PieceRefused,
    PieceSized,
    SwarmScheduler,
    SwarmTick,
)
from barnraise.identity import NodeId


def node(number: int) -> NodeId:
    return NodeId(bytes([number]) * 32)


def some_pieces(count: int, chance: random.Random) -> list[PieceSized]:
    return [
        PieceSized(PieceName(number.to_bytes(32, "big"), 0), chance.choice([100, 5000, PIECE]))
        for number in range(count)
    ]


class World:
    """Simulated time, links and messages; peers answer as the real ones do."""

    def __init__(self, sources: int, receivers: int, pieces: list[PieceSized], chance: random.Random) -> None:
        self.chance = chance
        self.now = 0.0
        self.pieces = pieces
        self.sizes = dict(pieces)
        self.sources = [node(100 + number) for number in range(sources)]
        self.receivers = [node(number) for number in range(receivers)]
        everything = {piece.name for piece in pieces}
        self.has = {source: set(everything) for source in self.sources} | {
            receiver: set[PieceName]() for receiver in self.receivers
        }
        self.cut: set[frozenset[NodeId]] = set()
        self.on_way: list[tuple[NodeId, NodeId, object]] = []
        self.held: dict[tuple[NodeId, NodeId], set[PieceName]] = {}
        self.sent: Counter[PieceName] = Counter()
        self.states = {
            receiver: SwarmScheduler(
                receiver, self.sources, self.receivers, pieces, everything, [*self.sources, *self.receivers]
            )
            for receiver in self.receivers
        }
        self.tell_all(SwarmTick())

    def tell_all(self, event: swarm_scheduler.Event) -> None:
        for receiver in self.receivers:
            self.tell(receiver, event)

    def tell(self, receiver: NodeId, event: swarm_scheduler.Event) -> None:
        state = self.states[receiver]
        for ask in state.handle(event, self.now):
            assert ask.node != receiver
            assert len(set(ask.names)) == len(ask.names)
            assert not set(ask.names) & self.has[receiver]
            self.post(receiver, ask.node, ask)
        for other, peer in state._peers.items():
            assert peer.requested_bytes == sum(self.pieces[number].size for number in peer.requested), other
            assert peer.requested_bytes <= swarm_scheduler.WINDOW or len(peer.requested) == 1

    def post(self, sender: NodeId, to: NodeId, message: object) -> None:
        if frozenset((sender, to)) not in self.cut:
            self.on_way.append((sender, to, message))

    def step(self) -> bool:
        if not self.on_way:
            return False
        # In order on each link, in any order among links.
        links = list(dict.fromkeys((sender, to) for sender, to, _ in self.on_way))
        chosen = self.chance.choice(links)
        place = next(place for place, queued in enumerate(self.on_way) if queued[:2] == chosen)
        sender, to, message = self.on_way.pop(place)
        if isinstance(message, AskPeer):
            self.answer(to, sender, message)
        elif isinstance(message, PieceReceived):
            self.has[to].update(message.names)
            self.tell(to, message)
            for (holder, client), names in self.held.items():
                ready = names & self.has[to] if holder == to else set()
                if ready:
                    names -= ready
                    self.post(holder, client, PieceReceived(holder, sorted(ready)))
        else:
            assert isinstance(message, PieceRefused)
            self.tell(to, message)
        return True

    def answer(self, me: NodeId, client: NodeId, ask: AskPeer) -> None:
        have = [name for name in ask.names if name in self.has[me]]
        lack = [name for name in ask.names if name not in self.has[me]]
        for name in have:
            self.sent[name] += me in self.sources
            self.post(me, client, PieceReceived(me, [name]))
        if lack and ask.hold and me in self.states:
            self.held.setdefault((me, client), set()).update(lack)
        elif lack:
            self.post(me, client, PieceRefused(me, lack))

    def link(self, a: NodeId, b: NodeId, *, up: bool) -> None:
        pair = frozenset((a, b))
        if up == (pair not in self.cut):
            return
        self.cut ^= {pair}
        self.on_way = [queued for queued in self.on_way if frozenset(queued[:2]) != pair]
        for end, other_end in ((a, b), (b, a)):
            self.held.pop((end, other_end), None)
            if end in self.states:
                self.tell(end, PeerUp(other_end) if up else PeerDown(other_end))

    def settle(self, max_s: float = 600.0) -> None:
        """Deliver all messages, with ticks whenever none is on the way."""
        end = self.now + max_s
        while not all(state.done for state in self.states.values()):
            if not self.step():
                assert self.now < end, {receiver: state.left for receiver, state in self.states.items()}
                self.now += 1.0
                for holder, client in list(self.held):
                    if client in self.states and self.held[holder, client]:
                        self.tell(client, PiecePromised(holder))
                self.tell_all(SwarmTick())


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 60), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_source_without_failures_sends_each_piece_once(
    sources: int, receivers: int, count: int, chance: random.Random
) -> None:
    world = World(sources, receivers, some_pieces(count, chance), chance)
    world.settle()
    assert all(count == 1 for count in world.sent.values())
    assert world.now == 0.0


@given(st.integers(1, 2), st.integers(1, 4), st.integers(1, 40), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_every_piece_arrives_despite_lost_links(
    sources: int, receivers: int, count: int, chance: random.Random
) -> None:
    world = World(sources, receivers, some_pieces(count, chance), chance)
    nodes = [*world.sources, *world.receivers]
    for _ in range(chance.randrange(1, 60)):
        for _ in range(chance.randrange(8)):
            world.step()
        if chance.random() < 0.2:
            world.now += chance.random() * 40
            world.tell_all(SwarmTick())
        a, b = chance.sample(nodes, 2)
        world.link(a, b, up=chance.random() < 0.4)
    # One source becomes reachable again; all other links stay as they are.
    for receiver in world.receivers:
        world.link(world.sources[0], receiver, up=True)
    world.settle()


@given(st.integers(2, 4), st.integers(1, 40), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_complete_receiver_replaces_lost_source(receivers: int, count: int, chance: random.Random) -> None:
    world = World(1, receivers, some_pieces(count, chance), chance)
    for receiver in world.receivers:
        world.link(world.sources[0], receiver, up=False)
    rich = world.receivers[-1]
    world.has[rich] = {piece.name for piece in world.pieces}
    world.tell(rich, PieceReceived(world.sources[0], sorted(world.has[rich])))
    world.held.clear()
    world.settle()


def test_silent_peer_is_replaced_by_another() -> None:
    chance = random.Random(1)
    pieces = some_pieces(20, chance)
    names = {piece.name for piece in pieces}
    me, other, source = node(1), node(2), node(100)
    state = SwarmScheduler(me, [source], [me, other], pieces, names, [other, source])
    requests = {ask.node: set(ask.names) for ask in state.handle(SwarmTick(), 0.0)}
    assert requests.keys() == {other, source}
    assert set(state.waits_for()) == {other, source}
    while waiting := [pieces[number].name for number in state._peers[source].requested]:
        state.handle(PieceReceived(source, waiting), 1.0)
    again = state.handle(SwarmTick(), 31.0)
    assert {ask.node for ask in again} == {source}
    # A late answer of the silent peer is accepted, and the peer is asked again.
    assert state.wants(other, sorted(requests[other])[0])


def test_peer_with_wrong_hash_is_never_asked_again() -> None:
    pieces = some_pieces(50, random.Random(2))
    me, liar, source = node(1), node(2), node(100)
    state = SwarmScheduler(me, [source], [me, liar], pieces, {piece.name for piece in pieces}, [liar, source])
    state.handle(SwarmTick(), 0.0)
    asks = state.handle(PeerDistrusted(liar), 0.0)
    asks += (
        state.handle(PeerDown(liar), 1.0) + state.handle(PeerUp(liar), 2.0) + state.handle(SwarmTick(), 100.0)
    )
    assert liar not in {ask.node for ask in asks}
    assert not state.wants(liar, pieces[0].name)
    assert state.has_trusted_source()


def test_peer_that_declines_is_asked_after_backoff() -> None:
    pieces = [PieceSized(PieceName(number.to_bytes(32, "big"), 0), PIECE) for number in range(40)]
    me, idle, source = node(1), node(2), node(100)
    state = SwarmScheduler(me, [source], [me, idle], pieces, {piece.name for piece in pieces}, [idle, source])
    (request,) = [ask for ask in state.handle(SwarmTick(), 0.0) if ask.node == idle]
    state.handle(PieceRefused(idle, request.names), 3.0)
    total = 0
    while not state.done and total < 100:
        total += 1
        waiting = [state._pieces[number].name for number in state._peers[source].requested]
        for ask in state.handle(PieceReceived(source, waiting), 3.0):
            assert ask.node == source
    assert state.done
