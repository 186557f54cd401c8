"""Peer table: which members are dead, leaving or arriving, judged from heartbeats. Pure."""

from __future__ import annotations

import msgspec

from barnraise.membership import failure_detector
from barnraise.membership.history import History
from barnraise.membership.messages import Heartbeat
from barnraise.membership.peers import PeerState
from barnraise.membership.view import PresentMember

_MOST_VISITORS = 64


class PeerTable:
    """All peers of one node, compared with the view."""

    def __init__(self, me: bytes, history: History, now: float) -> None:
        self._me = me
        self._history = history
        self.peers: dict[bytes, PeerState] = {}
        self.forked: set[bytes] = set()
        self.watching: frozenset[bytes] = frozenset()
        self.woke_at = -1e9
        self.view_changed(now)

    def view_changed(self, now: float) -> None:
        """Update which members this node watches."""
        before = self.watching
        self.watching = failure_detector.watched(self._history.members, self._me)
        for node in self.others():
            peer = self.peer(node, now)
            if node in self.watching and node not in before:
                peer.detector.reset_timeout(now)  # it had no reason to speak to us until now

    def others(self) -> list[bytes]:
        """Return the members of the view except this node."""
        return [node for node in self._history.members if node != self._me]

    def peer(self, node: bytes, now: float) -> PeerState:
        """Return the state of a peer; create it if it is new."""
        peer = self.peers.get(node)
        if peer is None:
            peer = self.peers[node] = PeerState(now)
        return peer

    def silent(self, now: float) -> frozenset[bytes]:
        """Return the watched members without recent heartbeats."""
        return frozenset(node for node in self.watching if self.peer(node, now).is_suspect(now))

    def unreachable(self, now: float) -> frozenset[bytes]:
        """Return members without heartbeats, and unwatched members without a link."""
        far = {node for node in self.others() if node not in self.watching}
        return self.silent(now) | {node for node in far if not self.peer(node, now).linked}

    def fresh_beat(self, node: bytes, now: float) -> Heartbeat | None:
        """Return the last heartbeat of a peer if it is recent and came after the last sleep, else None."""
        peer = self.peers.get(node)
        if peer is None or peer.present(now) is None or peer.heartbeat_at <= self.woke_at:
            return None
        return peer.beat

    def has_newer_branch(self, branch: int, now: float) -> bool:
        """Return True if a live owner is on a newer branch."""
        return any(beat.branch > branch for beat in self._owner_beats(now).values())

    def has_newer_decision(self, branch: int, number: int, now: float) -> bool:
        """Return True if a live owner knows a later decision than the given one."""
        return any((beat.branch, beat.number) > (branch, number) for beat in self._owner_beats(now).values())

    def on_branch(self, branch: int, now: float) -> frozenset[bytes]:
        """Return the live owners that say themselves that they are on a branch."""
        return frozenset(node for node, beat in self._owner_beats(now).items() if beat.branch == branch)

    def _owner_beats(self, now: float) -> dict[bytes, Heartbeat]:
        beats = {node: self.fresh_beat(node, now) for node in self.peers}
        return {
            node: beat
            for node, beat in beats.items()
            if beat is not None and self._history.role(node) == "owner"
        }

    def woke_up(self, now: float) -> None:
        """Give every peer time to speak after a sleep; what it said before does not count as recent."""
        self.woke_at = now
        for peer in self.peers.values():
            peer.detector.reset_timeout(now)

    def alive(self, now: float) -> frozenset[bytes]:
        """Return nodes that are certainly alive: with a recent heartbeat, or unwatched with a link."""
        present = {node for node, peer in self.peers.items() if peer.present(now) is not None}
        far = (node for node in self._history.members if node not in self.watching and node != self._me)
        return frozenset(present | {node for node in far if self.peer(node, now).linked})

    def dead(self, now: float) -> frozenset[bytes]:
        """Return the members that are judged dead."""
        others = {}
        for node, peer in self.peers.items():
            suspects = peer.suspects(now)
            if suspects is not None and not peer.is_suspect(now) and self._history.role(node) == "owner":
                others[node] = suspects
        return failure_detector.judged_dead(self._history.members, self.silent(now), others)

    def leaving(self) -> frozenset[bytes]:
        """Return the members that have said goodbye."""
        members = self._history.members
        return frozenset(
            node
            for node, peer in self.peers.items()
            if peer.leaving is not None and node in members and members[node].incarnation == peer.leaving
        )

    def visitors(self, now: float) -> tuple[PresentMember, ...]:
        """Return live nodes that are not in the view, since the coordinator may have no link to them."""
        visitors = []
        for node, peer in self.peers.items():
            here = peer.present(now)
            if here is None or self._history.role(node) is None or peer.leaving == here.incarnation:
                continue
            member = self._history.member(node)
            if member is None or member.incarnation != here.incarnation:
                visitors.append(here)
        return tuple(visitors[:_MOST_VISITORS])

    def arrived(self, barred: frozenset[bytes], now: float) -> dict[bytes, PresentMember]:
        """Return live nodes that may be in the next view, seen by this node or reported by a member."""
        candidates: dict[bytes, PresentMember] = {}
        for node, peer in self.peers.items():
            if node in self._history.members and self._history.role(node) == "owner":
                for here in peer.visitors(now):
                    if here.node != self._me and self._is_news(here, now):
                        candidates[here.node] = here
        for node, peer in self.peers.items():
            present = peer.present(now)
            if present is not None:
                candidates[node] = present
        allowed = {}
        for node, here in candidates.items():
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
        """Return True if a reported node is new.

        Members are watched directly, and other members may not know of an eviction yet.
        """
        member = self._history.member(here.node)
        if member is not None and member.incarnation == here.incarnation:
            return False
        known = self.peers.get(here.node)
        return known is None or not known.was_just_evicted(here.incarnation, now)
