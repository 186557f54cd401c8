"""Links to other workers: liveness, latency and bandwidth. No I/O of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from barnraise.transport.links.frames import FrameHeader, FrameKind
from barnraise.transport.links.link import Link

_FIRST_PINGS = 3
_RESUMED_S = 2.0  # a longer gap between two ticks means that this machine slept


@dataclass(frozen=True, slots=True)
class Clocks:
    """Heartbeat interval, and the silence after which a peer is lost."""

    heartbeat_s: float = 1.0
    silence_s: float = 5.0


@dataclass(slots=True, eq=False)
class PeerLink:
    """One link with its measurements and liveness."""

    worker: bytes
    link: Link
    heard_at: float
    spoke_at: float
    node: bytes = b""  # machine whose key signed for it; empty in plaintext
    heard_bytes: int = 0
    pings: dict[int, float] = field(default_factory=dict)
    ping_serial: int = 0
    pongs: int = 0
    round_trip_s: float | None = None
    seconds_per_byte: float | None = None
    goodbye: str | None = None
    probing_since: float | None = None  # our probe of it
    probe_began: float = 0.0  # its probe of us
    probe_bytes: int = 0
    probes_answered: int = 0

    def ping(self, now: float) -> None:
        self.pings[self.ping_serial] = now
        self.link.send(FrameHeader(FrameKind.PING, first=self.ping_serial))
        self.ping_serial = (self.ping_serial + 1) & 0xFFFFFFFF
        self.spoke_at = now
        while len(self.pings) > 8:
            del self.pings[next(iter(self.pings))]

    def pong(self, serial: int, now: float) -> bool:
        """Record a round trip. Return True when there are enough samples to judge the link."""
        started = self.pings.pop(serial, None)
        if started is None:
            return False
        sample = now - started
        self.pongs += 1
        if self.round_trip_s is None or self.pongs <= _FIRST_PINGS:
            self.round_trip_s = min(sample, self.round_trip_s or sample)
        else:
            self.round_trip_s += 0.125 * (sample - self.round_trip_s)
        if self.pongs < _FIRST_PINGS:
            self.ping(now)
        return self.pongs == _FIRST_PINGS

    @property
    def measured(self) -> bool:
        return self.pongs >= _FIRST_PINGS


class Peers:
    """All peers, by worker and by link."""

    def __init__(self, clocks: Clocks, now: Callable[[], float]) -> None:
        self._clocks = clocks
        self._now = now
        self._by_worker: dict[bytes, PeerLink] = {}
        self._by_link: dict[Link, PeerLink] = {}
        self._ticked_at = now()

    def __iter__(self) -> Iterator[PeerLink]:
        return iter(list(self._by_link.values()))

    def add(self, worker: bytes, link: Link, node: bytes) -> PeerLink:
        now = self._now()
        peer = PeerLink(worker, link, now, now, node)
        self._by_worker[worker] = peer
        self._by_link[link] = peer
        return peer

    @property
    def seconds_per_byte(self) -> float | None:
        """Return the value of the slowest measured link. Links of one machine share its port."""
        return max(
            (peer.seconds_per_byte for peer in self if peer.seconds_per_byte is not None), default=None
        )

    def get(self, worker: bytes) -> PeerLink | None:
        return self._by_worker.get(worker)

    def of(self, link: Link) -> PeerLink:
        return self._by_link[link]

    def remove(self, link: Link) -> PeerLink | None:
        peer = self._by_link.pop(link, None)
        if peer is not None and self._by_worker.get(peer.worker) is peer:
            del self._by_worker[peer.worker]
        return peer

    def tick(self, now: float) -> list[tuple[PeerLink, str]]:
        """Send heartbeats that are due. Return the peers that have been silent for too long."""
        slept = now - self._ticked_at
        self._ticked_at = now
        lost: list[tuple[PeerLink, str]] = []
        for peer in self:
            if slept > _RESUMED_S:
                peer.heard_at += slept
            if peer.link.bytes_in != peer.heard_bytes:
                peer.heard_bytes, peer.heard_at = peer.link.bytes_in, now
            silent = now - peer.heard_at
            if silent >= self._clocks.silence_s:
                lost.append((peer, f"it has been silent for {silent:.1f} s"))
            elif now - peer.spoke_at >= self._clocks.heartbeat_s:
                peer.ping(now)
        return lost
