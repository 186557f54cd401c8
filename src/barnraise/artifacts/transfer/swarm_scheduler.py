"""Swarm scheduler: which machine requests which piece from which, so that the source sends each about once.

It is pure: no clock, no network. Every receiver computes the same order of receivers for each piece. The
first of them requests it from a source. Every other requests it from the first one that it can reach, which
answers as soon as it has the piece. A receiver only ever waits for one before it in the order, so there is no
deadlock. If those before it are gone, it requests the piece from a source. If no source can be reached, it
asks every peer for what it has by now.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from barnraise.artifacts.store.manifest import PIECE
from barnraise.artifacts.transfer.messages import MOST_NAMES, PieceName
from barnraise.core.flow.backoff import Backoff, BackoffTimer
from barnraise.identity import NodeId

WINDOW = 8 << 20  # bytes that one peer may be asked for before it answers
MOST_ASKED = 4096
SILENCE_S = 30.0
HELD_S = 120.0  # how long another receiver may say that it still waits
RETRY_BACKOFF = Backoff(5.0, 60.0)  # between requests to a peer that does not answer
RETRY_S = 2.0  # pieces that no peer has are requested again after this


class PieceSized(NamedTuple):
    """Piece of the manifest, in the order that all machines share."""

    name: PieceName
    size: int


class AskPeer(NamedTuple):
    """Request to send now."""

    node: NodeId
    names: tuple[PieceName, ...]
    hold: bool


class PieceReceived(NamedTuple):
    """Event: pieces of ``node`` are in our store."""

    node: NodeId
    names: Sequence[PieceName]


class PieceRefused(NamedTuple):
    """Event: the peer does not have the pieces, or may not send them."""

    node: NodeId
    names: Sequence[PieceName]


class PiecePromised(NamedTuple):
    """Event: the peer still waits for the requested pieces."""

    node: NodeId


class PeerUp(NamedTuple):
    node: NodeId


class PeerDown(NamedTuple):
    node: NodeId


class PeerDistrusted(NamedTuple):
    """Event: the peer sent bytes with a wrong hash."""

    node: NodeId


class SwarmTick(NamedTuple):
    """Event: time has passed."""


Event = PieceReceived | PieceRefused | PiecePromised | PeerUp | PeerDown | PeerDistrusted | SwarmTick


@dataclass
class _Peer:
    linked: bool
    trusted: bool = True
    requested: dict[int, float] = field(default_factory=dict)
    holds: set[int] = field(default_factory=set)  # those of them that it may answer later
    requested_bytes: int = 0
    heard: float = 0.0
    slowest: float = 0.0  # how long one of its answers took
    window: int = WINDOW
    backoff: BackoffTimer = field(default_factory=lambda: BackoffTimer(RETRY_BACKOFF))
    retry_at: float | None = None

    def usable(self) -> bool:
        return self.linked and self.trusted and self.retry_at is None

    def has_room(self, size: int) -> bool:
        if not self.requested:
            return True
        return self.requested_bytes + size <= self.window and len(self.requested) < MOST_ASKED


class SwarmScheduler:
    """Schedule of one receiver's requests for its missing pieces."""

    def __init__(
        self,
        me: NodeId,
        sources: Iterable[NodeId],
        receivers: Iterable[NodeId],
        pieces: Sequence[PieceSized],
        missing: Collection[PieceName],
        linked: Collection[NodeId],
    ) -> None:
        self._me = me
        self.sources = [node for node in sources if node != me]
        self._order = sorted((set(receivers) | {me}) - set(self.sources))
        self._receivers = [node for node in self._order if node != me]
        self._pieces = pieces
        self._first = _first_receivers(pieces, len(self._order))
        self._peers = {node: _Peer(node in linked) for node in (*self.sources, *self._receivers)}
        self._number = {piece.name: number for number, piece in enumerate(pieces) if piece.name in missing}
        self.left = sum(pieces[number].size for number in self._number.values())
        self._refused: dict[int, set[NodeId]] = {}
        self._lanes: dict[
            NodeId | None, list[int]
        ] = {}  # by receiver; None: for a source, or any peer that has it
        self._parked: list[int] = []
        self._retry_at = 0.0
        self._sort()

    @property
    def done(self) -> bool:
        return not self._number

    def wants(self, node: NodeId, name: PieceName) -> bool:
        """Return True if a piece from that node is still missing."""
        peer = self._peers.get(node)
        return peer is not None and peer.trusted and name in self._number

    def lacks(self, name: PieceName) -> bool:
        return name in self._number

    def has_trusted_source(self) -> bool:
        return any(self._peers[node].trusted for node in self.sources)

    def waits_for(self) -> list[NodeId]:
        """Return the peers with open requests; if no peer can be asked, the sources."""
        return [node for node, peer in self._peers.items() if peer.requested] or self.sources

    def handle(self, event: Event, now: float) -> list[AskPeer]:
        """Handle an event and return the requests to send now."""
        match event:
            case PieceReceived(node, names):
                self._heard(node, now)
                for name in names:
                    self._arrived(name, now)
            case PieceRefused(node, names) if node in self._peers:
                self._on_refused(node, names, now)
            case PiecePromised(node):
                self._heard(node, now)
            case PeerUp(node):
                self._up(node)
            case PeerDown(node) | PeerDistrusted(node):
                self._lose(node, distrusted=isinstance(event, PeerDistrusted))
            case SwarmTick():
                self._look_at_clock(now)
        return self._ask(now)

    # events

    def _heard(self, node: NodeId, now: float) -> None:
        peer = self._peers.get(node)
        if peer is None:
            return
        peer.heard = now
        if peer.retry_at is not None:
            peer.retry_at = None
            self._sort()

    def _on_refused(self, node: NodeId, names: Sequence[PieceName], now: float) -> None:
        self._heard(node, now)
        idle = False
        for name in names:
            number = self._number.get(name)
            if number is not None and number in self._peers[node].requested:
                idle = idle or number in self._peers[node].holds
                self._release(node, number)
                self._refuse(node, number)
        if idle and node not in self.sources:
            # It does not fetch this itself: what it was to pass on is asked of others for a while.
            self._back_off(self._peers[node], now)
            self._sort()

    def _back_off(self, peer: _Peer, now: float) -> None:
        peer.retry_at = now + peer.backoff.next_wait()
        self._forget_asked(peer)

    def _forget_asked(self, peer: _Peer) -> None:
        peer.requested.clear()
        peer.holds.clear()
        peer.requested_bytes = 0

    def _arrived(self, name: PieceName, now: float) -> None:
        number = self._number.pop(name, None)
        if number is None:
            return
        self.left -= self._pieces[number].size
        self._refused.pop(number, None)
        for node, peer in self._peers.items():
            requested_at = peer.requested.get(number)
            if requested_at is not None:
                peer.slowest = max(0.9 * peer.slowest, now - requested_at)
                peer.backoff.reset()
                if peer.window < WINDOW:
                    peer.window = min(WINDOW, 2 * peer.window)
                self._release(node, number)

    def _up(self, node: NodeId) -> None:
        peer = self._peers.get(node)
        if peer is None or peer.linked:
            return
        peer.linked = True
        peer.retry_at = None
        for refusers in self._refused.values():
            refusers.discard(node)
        self._parked.clear()
        self._sort()

    def _lose(self, node: NodeId, *, distrusted: bool) -> None:
        peer = self._peers.get(node)
        if peer is None:
            return
        if distrusted:
            peer.trusted = False
        else:
            peer.linked = False
        self._forget_asked(peer)
        self._sort()

    def _look_at_clock(self, now: float) -> None:
        changed = False
        for node, peer in self._peers.items():
            if peer.retry_at is not None and now >= peer.retry_at:
                peer.retry_at = None
                changed = True
            if peer.requested and now - peer.heard > max(SILENCE_S, 4 * peer.slowest):
                self._back_off(peer, now)
                peer.window = PIECE
                changed = True
            elif node not in self.sources:
                for number in [number for number, at in peer.requested.items() if now - at > HELD_S]:
                    self._release(node, number)
                    self._refuse(node, number)
        if self._parked and now >= self._retry_at:
            for number in self._parked:
                self._refused.pop(number, None)
            self._parked.clear()
            changed = True
        if changed:
            self._sort()

    def _release(self, node: NodeId, number: int) -> None:
        peer = self._peers.get(node)
        if peer is None or peer.requested.pop(number, None) is None:
            return
        peer.holds.discard(number)
        peer.requested_bytes -= self._pieces[number].size

    def _refuse(self, node: NodeId, number: int) -> None:
        self._refused.setdefault(number, set()).add(node)
        heapq.heappush(self._lanes[self._peer_for(number)], number)

    # which peer to ask

    def _peer_for(self, number: int) -> NodeId | None:
        """Return the first receiver before us that can be asked, or None."""
        refusers = self._refused.get(number, ())
        first, others = self._first[number], len(self._order) - 1
        node = self._order[first]
        for step in range(others + 1):
            if node == self._me:
                return None
            if node not in refusers and self._peers[node].usable():
                return node
            # Each piece has its own order of stand-ins, so that those of a lost receiver are many.
            if step < others:
                node = self._order[(first + 1 + (number + step) % others) % (others + 1)]
        return None

    def _sort(self) -> None:
        """Group the pieces that are neither requested nor postponed by the peer to ask."""
        unavailable = {number for peer in self._peers.values() for number in peer.requested}
        unavailable.update(self._parked)
        lanes: dict[NodeId | None, list[int]] = {None: [], **{node: [] for node in self._receivers}}
        # Most pieces are asked of their first receiver; with many pieces this loop is what takes time.
        plain = [
            lanes[None] if node == self._me else lanes[node] if self._peers[node].usable() else None
            for node in self._order
        ]
        firsts, refused = self._first, self._refused
        for number in self._number.values():
            if number not in unavailable:
                lane = plain[firsts[number]] if number not in refused else None
                (lanes[self._peer_for(number)] if lane is None else lane).append(number)
        self._lanes = lanes

    def _ask(self, now: float) -> list[AskPeer]:
        asks: dict[tuple[NodeId, bool], list[PieceName]] = {}
        for node in self._receivers:
            lane = self._lanes[node]
            while lane and self._peers[node].has_room(self._pieces[lane[0]].size):
                self._take(node, heapq.heappop(lane), True, now, asks)
        lane = self._lanes[None]
        while lane:
            number = lane[0]
            helpers = self._helpers(number)
            if not helpers:
                self._parked.append(heapq.heappop(lane))
                if len(self._parked) == 1:
                    self._retry_at = now + RETRY_S
                continue
            node = min(helpers, key=lambda helper: self._peers[helper].requested_bytes)
            if not self._peers[node].has_room(self._pieces[number].size):
                break
            self._take(node, heapq.heappop(lane), node in self.sources, now, asks)
        return [
            AskPeer(node, tuple(names[start : start + MOST_NAMES]), hold)
            for (node, hold), names in asks.items()
            for start in range(0, len(names), MOST_NAMES)
        ]

    def _helpers(self, number: int) -> list[NodeId]:
        refusers = self._refused.get(number, ())
        for nodes in (self.sources, self._receivers):
            helpers = [node for node in nodes if node not in refusers and self._peers[node].usable()]
            if helpers:
                return helpers
        return []

    def _take(
        self,
        node: NodeId,
        number: int,
        hold: bool,
        now: float,
        asks: dict[tuple[NodeId, bool], list[PieceName]],
    ) -> None:
        peer = self._peers[node]
        if self._pieces[number].name not in self._number:
            return  # it came late from another peer
        if not peer.requested:
            peer.heard = now
        peer.requested[number] = now
        if hold:
            peer.holds.add(number)
        peer.requested_bytes += self._pieces[number].size
        asks.setdefault((node, hold), []).append(self._pieces[number].name)


def _first_receivers(pieces: Sequence[PieceSized], receivers: int) -> list[int]:
    """Return for each piece the receiver with the fewest bytes to request from the sources.

    The result is the same on every machine.
    """
    load = [(0, place) for place in range(receivers)]
    firsts = []
    for piece in pieces:
        size, place = load[0]
        firsts.append(place)
        heapq.heapreplace(load, (size + piece.size, place))
    return firsts
