"""The beats that one node sends: numbered, timed, and telling each peer what it needs to know. Pure."""

from __future__ import annotations

from barnraise.membership.failure_detector import BEAT_S
from barnraise.membership.history import History
from barnraise.membership.messages import Heartbeat
from barnraise.membership.peers import PeerState
from barnraise.membership.view import PresentMember

_KEPT = 64


class HeartbeatSender:
    """When the next beat is due, and when each of the last ones was sent."""

    def __init__(self, now: float) -> None:
        self.next_at = now
        self._serial = 0
        self._sent: dict[int, float] = {}

    def strike(self, now: float) -> None:
        """A beat goes out to everybody now."""
        self.next_at = now + BEAT_S
        self._serial += 1
        self._sent[self._serial] = now
        self._sent.pop(self._serial - _KEPT, None)

    def echoed(self, peer: PeerState, beat: Heartbeat, now: float) -> None:
        """A beat says which of ours its sender had; only a newer one than before is news."""
        sent = self._sent.get(beat.echo)
        if sent is not None and beat.echo > peer.echo:
            peer.echo = beat.echo
            peer.health.echo(now, now - sent - beat.held_us / 1e6)

    def beat(
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
        decided = history.decided
        return Heartbeat(
            me=me,
            serial=max(1, self._serial),
            echo=peer.serial,
            held_us=max(0, int((now - peer.got) * 1e6)),
            branch=decided.branch,
            number=decided.number,
            view=history.record.digest,
            log_length=len(history.log.entries),
            log_head=history.log.head,
            leaving=leaving,
            suspects=tuple(sorted(suspects)),
            visitors=visitors,
        )
