"""Link measurement: when to measure, how much to send, and the bandwidth estimate. Pure.

It limits its traffic. There is one measurement at a time per machine (`measurement_slots`), and none beside a
run unless the user asks. One takes at most a second or 16 MB, and less once the figure is steady.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from barnraise.core.units import format_duration
from barnraise.topology.graph import LinkFacts, Pair, TopologyGraph, ordered_pair

MOST_BYTES = 16 * 1024 * 1024
MOST_SECONDS = 1.0
LARGEST_PIECE = 64 * 1024
AGAIN_S = 6 * 3600.0
RETRY_S = 600.0
_FACTOR = 2.0
# On a LAN a round trip doubles by chance; below this it says nothing about the link.
_LEAST_CHANGE_S = 0.002

_WINDOWS = 8
_RAMP = 0.15
_STEADY_S = 0.1
_STEADY_SPREAD = 0.1
_TICK_S = 1e-9
_FEWEST = 4
_FIRST_WINDOW = 32 * 1024
_SMALL_PIECE = 2 * 1024
_SLOW_BYTES = 128 * 1024
_LARGEST_WINDOW = 4 * 1024 * 1024
_WINDOW_S = 0.2


@dataclass(frozen=True)
class MeasuredLink:
    """Last measurement of a pair: time, round trip, and whether it gave a figure."""

    at_s: float
    rtt_s: float
    succeeded: bool = True


def next_measurement(
    graph: TopologyGraph,
    now: float,
    busy: Collection[str],
    last: Mapping[Pair, MeasuredLink],
    *,
    under_way: Collection[Pair] = (),
    requested: Collection[Pair] = (),
) -> Pair | None:
    """Return the pair to measure next, or None.

    ``busy``: nodes of a run; a pair with one of them is measured only if it is ``requested``. A node of a
    measurement that is ``under_way`` waits in any case.
    """
    occupied = {node for pair in under_way for node in pair}
    wishes = {ordered_pair(*pair) for pair in requested}
    best: tuple[tuple[bool, bool, float, Pair], Pair] | None = None
    for link in graph.links:
        pair = (link.a, link.b)
        wished = pair in wishes
        if occupied & set(pair) or (not wished and (link.a in busy or link.b in busy)):
            continue
        before = last.get(pair)
        if not wished and why_measure(link, before, now) is None:
            continue
        # First what was requested, then what was never measured, then what is oldest.
        rank = (not wished, before is not None, before.at_s if before is not None else 0.0, pair)
        if best is None or rank < best[0]:
            best = (rank, pair)
    return None if best is None else best[1]


def why_measure(link: LinkFacts, before: MeasuredLink | None, now: float) -> str | None:
    """Return the reason to measure a link now, for the log, or None."""
    if before is None:
        return "it was never measured"
    age = now - before.at_s
    if age < RETRY_S:
        return None
    if not before.succeeded:
        return "the last attempt gave no figure"
    if age >= AGAIN_S:
        return f"it was measured {format_duration(age)} ago"
    if link.rtt_s >= _FACTOR * before.rtt_s and link.rtt_s - before.rtt_s >= _LEAST_CHANGE_S:
        was, now_is = format_duration(before.rtt_s), format_duration(link.rtt_s)
        return f"its round trip went from {was} to {now_is}"
    return None


@dataclass(frozen=True)
class LinkEstimate:
    """Estimate from the arrivals so far. ``enough``: the receiver should stop the sender."""

    mbps: float | None
    spread: float
    received: int
    seconds: float
    enough: bool
    reason: str


def estimate(train: Sequence[tuple[float, int]]) -> LinkEstimate:
    """Return Mbit/s from arrivals ``(time, bytes)`` in their order, with the spread of its parts.

    The bytes of the first arrival do not count, since their send time is unknown. The first part of the rest
    is left out as well, while TCP finds its speed. The remainder is cut into parts of equal bytes. The result
    is the median of their rates: a stall and the burst after it are outliers on either side.
    """
    received = sum(size for _, size in train)
    seconds = max(0.0, train[-1][0] - train[0][0]) if train else 0.0
    full = received >= MOST_BYTES or seconds >= MOST_SECONDS
    rates = _rates(train) if len(train) >= _FEWEST else []
    if len(rates) < _FEWEST:
        reason = "too few bytes arrived for an estimate" if full else "too few bytes have arrived yet"
        return LinkEstimate(None, 0.0, received, seconds, full, reason)
    lower, median, upper = statistics.quantiles(rates, n=4)
    spread = (upper - lower) / median
    half = len(rates) // 2
    drift = abs(statistics.median(rates[:half]) - statistics.median(rates[half:])) / median
    steady = seconds >= _STEADY_S and spread <= _STEADY_SPREAD and drift <= _STEADY_SPREAD
    if steady:
        reason = "the figure is steady"
    else:
        reason = "the limit of traffic is reached" if full else "the figure still changes"
    return LinkEstimate(median * 8 / 1e6, spread, received, seconds, full or steady, reason)


def next_piece(sent: int, received: int, elapsed_s: float) -> int:
    """Return the bytes to send now in one message; 0 to wait until more has arrived.

    Messages start small: of a slow link only a few large ones would arrive in time, too few for an estimate.
    """
    largest = LARGEST_PIECE if received >= _SLOW_BYTES else _SMALL_PIECE
    return min(largest, send_allowance(sent, received, elapsed_s))


def send_allowance(sent: int, received: int, elapsed_s: float) -> int:
    """Return how many more bytes may be sent now.

    ``received``: bytes of ``sent`` that the receiver confirmed. Bytes in buffers on the way are traffic, too,
    and a slow link would carry them for seconds after the end. So the unconfirmed part stays below a fifth of
    a second at the speed seen so far.
    """
    if elapsed_s >= MOST_SECONDS or sent >= MOST_BYTES:
        return 0
    speed = received / elapsed_s if elapsed_s > 0 else 0.0
    window = min(_LARGEST_WINDOW, max(_FIRST_WINDOW, int(speed * _WINDOW_S)))
    return max(0, min(window - (sent - received), MOST_BYTES - sent))


def _rates(train: Sequence[tuple[float, int]]) -> list[float]:
    """Return the bytes per second of parts of equal bytes; leave out parts too short for any clock."""
    times, counts = [train[0][0]], [0.0]
    for at, size in train[1:]:
        times.append(max(at, times[-1]))
        counts.append(counts[-1] + max(0, size))
    total = counts[-1]
    if total <= 0:
        return []
    step = total * (1 - _RAMP) / _WINDOWS
    edges = [_when(total * _RAMP + step * number, times, counts) for number in range(_WINDOWS + 1)]
    return [step / (end - begin) for begin, end in pairwise(edges) if end - begin > _TICK_S]


def _when(count: float, times: Sequence[float], counts: Sequence[float]) -> float:
    """Return the time at which this many bytes had arrived, interpolated between arrivals."""
    place = min(max(1, bisect_left(counts, count)), len(counts) - 1)
    size = counts[place] - counts[place - 1]
    share = min(1.0, (count - counts[place - 1]) / size) if size > 0 else 1.0
    return times[place - 1] + share * (times[place] - times[place - 1])
