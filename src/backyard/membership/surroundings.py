"""What a node can tell of the others from their beats: who is dead, who leaves, who wants in. Pure."""

from __future__ import annotations

import msgspec

from backyard.membership import health
from backyard.membership.history import History
from backyard.membership.peers import Peer
from backyard.membership.view import Present

_MOST_VISITORS = 64


class Surroundings:
    """All the peers of one node, seen against the view."""

    def __init__(self, me: bytes, history: History, now: float) -> None:
        self._me = me
        self._history = history
        self.peers: dict[bytes, Peer] = {}
        self.forked: set[bytes] = set()
        self.view_changed(now)

    def view_changed(self, now: float) -> None:
        self.watching = health.watched(self._history.places, self._me)
        for node in self.others():
            self.peer(node, now)

    def others(self) -> list[bytes]:
        return [node for node in self._history.places if node != self._me]

    def peer(self, node: bytes, now: float) -> Peer:
        peer = self.peers.get(node)
        if peer is None:
            peer = self.peers[node] = Peer(now)
        return peer

    def unheard(self, now: float) -> frozenset[bytes]:
        """The members that we watch and do not hear."""
        return frozenset(node for node in self.watching if self.peer(node, now).is_suspect(now))

    def dead(self, now: float) -> frozenset[bytes]:
        """Members that are dead as far as can be told."""
        others = {}
        for node, peer in self.peers.items():
            said = peer.suspects(now)
            if said is not None and not peer.is_suspect(now):
                others[node] = said
        return health.judged_dead(self._history.places, self.unheard(now), others)

    def leavers(self) -> frozenset[bytes]:
        """Members that have said goodbye."""
        members = self._history.places
        return frozenset(
            node
            for node, peer in self.peers.items()
            if peer.leaving is not None and node in members and members[node].incarnation == peer.leaving
        )

    def visitors(self, now: float) -> tuple[Present, ...]:
        """Nodes that want in and that we hear: the coordinator may have no link to them."""
        found = []
        for node, peer in self.peers.items():
            here = peer.present(now)
            if here is None or self._history.role(node) is None or peer.leaving == here.incarnation:
                continue
            member = self._history.place(node)
            if member is None or member.incarnation != here.incarnation:
                found.append(here)
        return tuple(found[:_MOST_VISITORS])

    def arrived(self, barred: frozenset[bytes], now: float) -> dict[bytes, Present]:
        """Everybody else who is alive and may be in the next view, by our own ears or a member's word."""
        found: dict[bytes, Present] = {}
        for node, peer in self.peers.items():
            if node in self._history.places:
                found |= {here.node: here for here in peer.visitors(now) if here.node != self._me}
        for node, peer in self.peers.items():
            here = peer.present(now)
            if here is not None:
                found[node] = here
            elif node in self._history.places and peer.is_suspect(now):
                found.pop(node, None)
        allowed = {}
        for node, here in found.items():
            role, known = self._history.role(node), self.peers.get(node)
            if role is None or node in barred or node in self.forked:
                continue
            if known is not None and (now < known.held_off or known.leaving == here.incarnation):
                continue
            allowed[node] = msgspec.structs.replace(here, votes=here.votes and role == "owner")
        return allowed
