"""Simulated links on a fake clock, shared by all streams that use them at the same time.

There is one stream from one machine to another, like one connection: messages follow each other. Each link is
shared fairly: if another link limits a stream, the other streams get the rest. A stream is as fast as the
smallest of its shares. So a change at one link affects only the streams that use it, which keeps thousands of
streams cheap. Against max-min fairness a little capacity may stay unused if streams are limited elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.simulation.fake_clock import FakeClock

_BYTES_PER_MBIT = 1e6 / 8


class Link:
    """One direction of a wire."""

    def __init__(self, name: str, mbps: float) -> None:
        self.name, self.rate = name, mbps * _BYTES_PER_MBIT
        self.carried = 0.0  # bytes
        # Those that have something to send. In order, so that each simulation is the same every time.
        self.streams: dict[_Stream, None] = {}


class Way(NamedTuple):
    """From one machine to another."""

    links: Sequence[Link]
    delay_s: float


class _Stream:
    def __init__(self, way: Way) -> None:
        self.way = way
        # Most bytes/s that the stream can use of each link, because its other links are not faster.
        self.max_rates = {
            link: min(other.rate for other in way.links if other is not link) for link in way.links
        }
        self.shares: dict[Link, float] = {}
        self.waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self.left = 0.0  # bytes of the message that is being sent
        self.rate = 0.0
        self.since = 0.0
        self.ticket = 0  # of the moment at which the message will be sent; an older one means nothing


class Network:
    """``way_of``: which links lie between two machines; two at least."""

    def __init__(self, clock: FakeClock, way_of: Callable[[int, int], Way]) -> None:
        self._clock, self._way_of = clock, way_of
        self._streams: dict[Hashable, dict[tuple[int, int], _Stream]] = {}
        self._loads: dict[int, tuple[dict[Link, int], float]] = {}
        self._exchanges: set[Hashable] = set()
        self._dropped: set[Hashable] = set()

    def send(
        self, owner: Hashable, source: int, target: int, size: float, arrived: Callable[[], None]
    ) -> None:
        """Send a message; ``owner``: the group that `drop` names."""
        if owner in self._dropped:
            return
        streams = self._streams.setdefault(owner, {})
        stream = streams.get((source, target))
        if stream is None:
            stream = streams[source, target] = _Stream(self._way_of(source, target))
        stream.waiting.append((size, arrived))
        if len(stream.waiting) == 1:
            stream.left, stream.rate, stream.since = size, 0.0, self._clock.now
            for link in stream.way.links:
                link.streams[stream] = None
            self._share(stream.way.links)

    def drop(self, owner: Hashable) -> None:
        """Drop the unsent messages of this owner, and ignore its further messages."""
        self._dropped.add(owner)
        self._exchanges.discard(owner)
        for stream in self._streams.pop(owner, {}).values():
            if stream.waiting:
                stream.waiting.clear()
                self._rest(stream)

    def exchange(self, owner: Hashable, hosts: Sequence[int], size: float, done: Callable[[], None]) -> None:
        """Exchange ``size`` bytes between all pairs of hosts, while no other traffic exists.

        For groups whose single messages are too many: the fullest link and the pair with the longest delay
        set the time.
        """
        loads, delay_s = self._exchange_loads(hosts)
        for link, messages in loads.items():
            link.carried += messages * size
        seconds = max((messages * size / link.rate for link, messages in loads.items()), default=0.0)
        self._exchanges.add(owner)

        def ended() -> None:
            if owner in self._exchanges:
                self._exchanges.discard(owner)
                done()

        self._clock.later(delay_s + seconds, ended)

    def _exchange_loads(self, hosts: Sequence[int]) -> tuple[dict[Link, int], float]:
        """Return the messages through each link, and the longest delay; reused for groups of similar size."""
        key = len(hosts) // 20
        if key not in self._loads:
            loads: dict[Link, int] = {}
            delay_s = 0.0
            for source in hosts:
                for target in hosts:
                    if source != target:
                        way = self._way_of(source, target)
                        delay_s = max(delay_s, way.delay_s)
                        for link in way.links:
                            loads[link] = loads.get(link, 0) + 1
            self._loads[key] = loads, delay_s
        return self._loads[key]

    def _rest(self, stream: _Stream) -> None:
        stream.ticket += 1
        for link in stream.way.links:
            del link.streams[stream]
        self._share(stream.way.links)

    def _share(self, links: Sequence[Link]) -> None:
        """Share these links again after their streams have changed."""
        changed: dict[_Stream, None] = {}
        for link in links:
            for stream, share in fair_shares(link).items():
                if stream.shares.get(link) != share:
                    stream.shares[link] = share
                    changed[stream] = None
        for stream in changed:
            rate = min(stream.shares.values())
            if rate != stream.rate:
                stream.left -= stream.rate * (self._clock.now - stream.since)
                stream.rate, stream.since = rate, self._clock.now
                self._await_end(stream)
        for stream in (stream for link in links for stream in link.streams):
            if not stream.rate:  # it has just begun, with the shares that it had before
                stream.rate = min(stream.shares.values())
                self._await_end(stream)

    def _await_end(self, stream: _Stream) -> None:
        stream.ticket += 1
        seconds = max(0.0, stream.left) / stream.rate
        self._clock.later(seconds, partial(self._sent, stream, stream.ticket))

    def _sent(self, stream: _Stream, ticket: int) -> None:
        if ticket != stream.ticket:
            return
        size, arrived = stream.waiting.popleft()
        for link in stream.way.links:
            link.carried += size
        self._clock.later(stream.way.delay_s, arrived)
        if stream.waiting:
            stream.left, stream.since = stream.waiting[0][0], self._clock.now
            self._await_end(stream)
        else:
            self._rest(stream)


def fair_shares(link: Link) -> dict[_Stream, float]:
    """Return the fair share of each stream that uses the link now."""
    if len(link.streams) < 2:
        return dict.fromkeys(link.streams, link.rate)
    spare, left = link.rate, len(link.streams)
    shares: dict[_Stream, float] = {}
    for stream in sorted(link.streams, key=lambda candidate: candidate.max_rates[link]):
        shares[stream] = min(stream.max_rates[link], spare / left)
        spare -= shares[stream]
        left -= 1
    return shares
