"""State of one peer, learned from its heartbeats. Pure."""

from __future__ import annotations

from barnraise.membership.consensus.paxos import ChainPosition
from barnraise.membership.failure_detector import HEARTBEAT_S, FailureDetector
from barnraise.membership.messages import Heartbeat
from barnraise.membership.view import PresentMember

_REPORT_S = 6 * HEARTBEAT_S
_MOST_HOLD_S = 8.0
_FORGET_S = 60.0
_MOST_LIVES = 10  # restarts in a minute before it has to wait
_MOST_GUEST_LIVES = 3
_JUST_S = 5.0


class PeerState:
    """State of one other node, with or without a link."""

    __slots__ = (
        "_evicted",
        "_gone_as",
        "_held_off",
        "_lives",
        "_reported",
        "beat",
        "catch_up_sent_at",
        "decision_sent_at",
        "detector",
        "echo",
        "gone",
        "heartbeat_at",
        "leaving",
        "linked",
        "serial",
    )

    def __init__(self, now: float) -> None:
        self.detector = FailureDetector(now)
        self.beat: Heartbeat | None = None
        self.serial = 0
        self.heartbeat_at = now
        self.gone = False
        self.leaving: bytes | None = None
        self.linked = False
        self.echo = 0
        self.decision_sent_at = self.catch_up_sent_at = -1e9
        self._held_off = -1e9
        self._gone_as = b""
        self._reported = -1e9
        self._evicted: list[float] = []
        self._lives: list[float] = []

    def heard(self, beat: Heartbeat, now: float) -> None:
        """Record a heartbeat; ignore late and repeated ones."""
        if self.beat is not None and beat.me.incarnation != self.beat.me.incarnation:
            self.detector, self.serial, self.echo = FailureDetector(now), 0, 0
            self._lives = [*(then for then in self._lives if now - then < _FORGET_S), now]
        if beat.serial <= self.serial:  # a late or doubled one
            return
        self.beat, self.serial, self.heartbeat_at, self.gone = beat, beat.serial, now, False
        self.detector.beat(now)
        self._reported = now

    @property
    def position(self) -> ChainPosition:
        """Return the chain position in its last heartbeat."""
        return (
            ChainPosition(self.beat.branch, self.beat.number)
            if self.beat is not None
            else ChainPosition(0, 0)
        )

    @property
    def log_length(self) -> int:
        """Return the length of its trust log in its last heartbeat."""
        return self.beat.log_length if self.beat is not None else 0

    def present(self, now: float) -> PresentMember | None:
        """Return its incarnation if a heartbeat has just arrived, else None."""
        if self.beat is None or self.gone or self.detector.is_silent(now):
            return None
        return self.beat.me if now - self.heartbeat_at <= self.detector.timeout_s else None

    def is_suspect(self, now: float) -> bool:
        """Return True if the peer is gone or silent."""
        return self.gone or self.detector.is_silent(now)

    def suspects(self, now: float) -> tuple[bytes, ...] | None:
        """Return the nodes that it suspects, or None if it has not reported lately."""
        if self.beat is None or now - self._reported > _REPORT_S:
            return None
        return self.beat.suspects

    def visitors(self, now: float) -> tuple[PresentMember, ...]:
        """Return the waiting nodes that it reported lately."""
        if self.beat is None or now - self._reported > _REPORT_S:
            return ()
        return self.beat.visitors

    def evicted(self, now: float) -> None:
        """Record an eviction of the peer. Repeated ones delay its next admission: 0, 1, 2, 4, 8 s."""
        self._evicted = [then for then in self._evicted if now - then < _FORGET_S]
        count = len(self._evicted)
        self._evicted.append(now)
        self._gone_as = self.beat.me.incarnation if self.beat is not None else b""
        self._held_off = now + (min(_MOST_HOLD_S, 2.0 ** (count - 1)) if count else 0.0)

    def must_wait(self, incarnation: bytes, now: float, *, guest: bool) -> bool:
        """Return True if this incarnation may not be admitted yet.

        Only the evicted incarnation and a node that restarts too often must wait.
        """
        max_lives = _MOST_GUEST_LIVES if guest else _MOST_LIVES
        if len(self._lives) > max_lives and now - self._lives[-1] < _MOST_HOLD_S:
            return True
        return incarnation == self._gone_as and now < self._held_off

    def was_just_evicted(self, incarnation: bytes, now: float) -> bool:
        """Return True if reports of other members about this incarnation may be out of date."""
        return incarnation == self._gone_as and bool(self._evicted) and now - self._evicted[-1] < _JUST_S
