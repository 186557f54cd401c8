"""Heartbeats that one node sends: numbered, timed, with what each peer needs to know. Pure."""

from __future__ import annotations

from barnraise.membership.failure_detector import HEARTBEAT_S
from barnraise.membership.history import History
from barnraise.membership.messages import Heartbeat
from barnraise.membership.peers import PeerState
from barnraise.membership.view import PresentMember

_KEPT = 64


class HeartbeatSender:
    """Time of the next heartbeat, and send times of recent ones."""

    def __init__(self, now: float) -> None:
        self.next_at = now
        self._serial = 0
        self._sent: dict[int, float] = {}

    def start_round(self, now: float) -> None:
        """Number a heartbeat that is sent to all peers now."""
        self.next_at = now + HEARTBEAT_S
        self._serial += 1
        self._sent[self._serial] = now
        self._sent.pop(self._serial - _KEPT, None)

    def measure_echo(self, peer: PeerState, beat: Heartbeat, now: float) -> None:
        """Measure the round trip of our heartbeat that the peer echoes, unless it is an old one."""
        sent = self._sent.get(beat.echo)
        if sent is not None and beat.echo > peer.echo:
            peer.echo = beat.echo
            peer.detector.echo(now, now - sent - beat.held_us / 1e6)

    def build(
        self,
        me: PresentMember,
        history: History,
        peer: PeerState,
        now: float,
        *,
        leaving: bool,
        suspects: frozenset[bytes],
        visitors: tuple[PresentMember, ...],
    ) -> Heartbeat:
        """Build the heartbeat for one peer."""
        decided = history.decided
        return Heartbeat(
            me=me,
            serial=max(1, self._serial),
            echo=peer.serial,
            held_us=max(0, int((now - peer.heartbeat_at) * 1e6)),
            branch=decided.branch,
            number=decided.number,
            view=history.record.digest,
            log_length=len(history.log.entries),
            log_head=history.log.head,
            leaving=leaving,
            suspects=tuple(sorted(suspects)),
            visitors=visitors,
        )
