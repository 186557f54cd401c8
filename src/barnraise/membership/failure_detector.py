"""Failure detector: how long a peer may be silent, learned from its own heartbeats. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

HEARTBEAT_S = 0.5
MIN_TIMEOUT_S = 1.5
MAX_TIMEOUT_S = 8.0
_WATCH_ALL = 16
_NEIGHBOURS = 4
_MEAN_GAIN = 1 / 8
_DEVIATION_GAIN = 1 / 4
_DEVIATIONS = 4.0
_TRIPS = 32


class SilenceEstimate:
    """Moving average and mean deviation of a quantity."""

    __slots__ = ("deviation", "mean")

    def __init__(self, mean: float, deviation: float) -> None:
        self.mean = mean
        self.deviation = deviation

    def add(self, value: float) -> None:
        """Add a sample to the average."""
        error = value - self.mean
        self.mean += _MEAN_GAIN * error
        self.deviation += _DEVIATION_GAIN * (abs(error) - self.deviation)


class FailureDetector:
    """Failure detector of one peer, which is silent if either direction of heartbeats stops."""

    __slots__ = ("echoed", "gap", "heard", "timeout_s", "trip", "trips")

    def __init__(self, now: float) -> None:
        self.heard = now
        self.echoed = now
        self.gap = SilenceEstimate(HEARTBEAT_S, HEARTBEAT_S / 8)
        self.trip = SilenceEstimate(0.0, 0.0)
        self.trips: deque[float] = deque(maxlen=_TRIPS)
        self.timeout_s = MIN_TIMEOUT_S

    def beat(self, now: float) -> None:
        """Record a heartbeat of the peer."""
        # A pause that ended in suspicion says nothing of the usual rhythm.
        if now - self.heard < MAX_TIMEOUT_S:
            self.gap.add(now - self.heard)
        self.heard = now
        self._update_timeout()

    def echo(self, now: float, trip: float) -> None:
        """Record that the peer had received a newer heartbeat of ours, after this round trip."""
        self.echoed = now
        if trip < 0:
            return
        if not self.trips:
            self.trip = SilenceEstimate(trip, trip / 2)
        else:
            self.trip.add(trip)
        self.trips.append(trip)
        self._update_timeout()

    def reset_timeout(self, now: float) -> None:
        """Restart the timeout, because this machine was asleep itself."""
        self.heard = self.echoed = now

    def is_silent(self, now: float) -> bool:
        """Return True if the timeout of either direction has passed."""
        return now - self.heard > self.timeout_s or now - self.echoed > self.timeout_s

    def _update_timeout(self) -> None:
        """Update the timeout from the estimates.

        A queue makes heartbeats irregular before it delays them much.
        """
        gap, trip = self.gap, self.trip
        wanted = gap.mean + trip.mean + _DEVIATIONS * (gap.deviation + trip.deviation)
        self.timeout_s = min(MAX_TIMEOUT_S, max(MIN_TIMEOUT_S, wanted))


def watched(nodes: Collection[bytes], me: bytes) -> frozenset[bytes]:
    """Return the nodes that ``me`` exchanges heartbeats with.

    These are all nodes of a small cluster, and the neighbours on a ring in a large one.
    """
    if len(nodes) <= _WATCH_ALL:
        return frozenset(node for node in nodes if node != me)
    ring = sorted({*nodes, me})
    place = ring.index(me)
    steps = [*range(-_NEIGHBOURS, 0), *range(1, _NEIGHBOURS + 1)]
    return frozenset(ring[(place + step) % len(ring)] for step in steps) - {me}


def judged_dead(
    nodes: Collection[bytes], own: Collection[bytes], others: Mapping[bytes, Collection[bytes]]
) -> frozenset[bytes]:
    """Return the nodes that a majority of the observers miss, at least two.

    One observer is enough where no second one is left to ask. In a large cluster, where few nodes watch each
    node, two are enough. ``own``: nodes that this node suspects. ``others``: nodes that each other node
    suspects.
    """
    if not own and not any(others.values()):
        return frozenset()
    witnesses = [node for node in others if node in nodes and node not in own]
    dead = set()
    for node in nodes:
        count = (node in own) + sum(node in others[witness] for witness in witnesses if witness != node)
        askable = sum(witness != node for witness in witnesses)
        majority = (1 + askable) // 2 + 1 if len(nodes) <= _WATCH_ALL else 2
        if count >= max(2, majority) or (count == 1 and node in own and not askable):
            dead.add(node)
    return frozenset(dead)
