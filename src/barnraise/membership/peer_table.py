"""What a node can tell of the others from their beats: who is dead, who leaves, who wants in. Pure."""

from __future__ import annotations

import msgspec

from barnraise.membership import failure_detector
from barnraise.membership.history import History
from barnraise.membership.peers import PeerState
from barnraise.membership.view import PresentMember

_MOST_VISITORS = 64


class PeerTable:
    """All the peers of one node, seen against the view."""

    def __init__(self, me: bytes, history: History, now: float) -> None:
        self._me = me
        self._history = history
        self.peers: dict[bytes, PeerState] = {}
        self.forked: set[bytes] = set()
        self.watching: frozenset[bytes] = frozenset()
        self.view_changed(now)

    def view_changed(self, now: float) -> None:
        before = self.watching
        self.watching = failure_detector.watched(self._history.places, self._me)
        for node in self.others():
            peer = self.peer(node, now)
            if node in self.watching and node not in before:
                peer.health.forgive(now)  # it had no reason to speak to us until now

    def others(self) -> list[bytes]:
        return [node for node in self._history.places if node != self._me]

    def peer(self, node: bytes, now: float) -> PeerState:
        peer = self.peers.get(node)
        if peer is None:
            peer = self.peers[node] = PeerState(now)
        return peer

    def unheard(self, now: float) -> frozenset[bytes]:
        """The members that we watch and do not hear."""
        return frozenset(node for node in self.watching if self.peer(node, now).is_suspect(now))

    def unreachable(self, now: float) -> frozenset[bytes]:
        """Members that we do not hear; of those whom we do not watch, the ones without a link."""
        far = {node for node in self.others() if node not in self.watching}
        return self.unheard(now) | {node for node in far if not self.peer(node, now).linked}

    def heard(self, now: float) -> frozenset[bytes]:
        """Nodes that are certainly alive: a beat has just come, or a link to one that we do not watch."""
        found = {node for node, peer in self.peers.items() if peer.present(now) is not None}
        far = (node for node in self._history.places if node not in self.watching and node != self._me)
        return frozenset(found | {node for node in far if self.peer(node, now).linked})

    def dead(self, now: float) -> frozenset[bytes]:
        """Members that are dead as far as can be told."""
        others = {}
        for node, peer in self.peers.items():
            said = peer.suspects(now)
            if said is not None and not peer.is_suspect(now) and self._history.role(node) == "owner":
                others[node] = said
        return failure_detector.judged_dead(self._history.places, self.unheard(now), others)

    def leavers(self) -> frozenset[bytes]:
        """Members that have said goodbye."""
        members = self._history.places
        return frozenset(
            node
            for node, peer in self.peers.items()
            if peer.leaving is not None and node in members and members[node].incarnation == peer.leaving
        )

    def visitors(self, now: float) -> tuple[PresentMember, ...]:
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

    def arrived(self, barred: frozenset[bytes], now: float) -> dict[bytes, PresentMember]:
        """Everybody else who is alive and may be in the next view, by our own ears or a member's word."""
        found: dict[bytes, PresentMember] = {}
        for node, peer in self.peers.items():
            if node in self._history.places and self._history.role(node) == "owner":
                for here in peer.visitors(now):
                    if here.node != self._me and self._is_news(here, now):
                        found[here.node] = here
        for node, peer in self.peers.items():
            present = peer.present(now)
            if present is not None:
                found[node] = present
        allowed = {}
        for node, here in found.items():
            role, known = self._history.role(node), self.peers.get(node)
            if role is None or node in barred or node in self.forked:
                continue
            if known is not None and known.leaving == here.incarnation:
                continue
            if known is not None and known.must_wait(here.incarnation, now, guest=role != "owner"):
                continue
            allowed[node] = msgspec.structs.replace(here, votes=here.votes and role == "owner")
        return allowed

    def _is_news(self, here: PresentMember, now: float) -> bool:
        """Of a member we have our own ears, and of one that we have just evicted others may not know yet."""
        member = self._history.place(here.node)
        if member is not None and member.incarnation == here.incarnation:
            return False
        known = self.peers.get(here.node)
        return known is None or not known.was_just_evicted(here.incarnation, now)
