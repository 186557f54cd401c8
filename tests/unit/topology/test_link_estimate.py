"""Link measurement: which pair, how much traffic, and the estimate."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.topology.graph import Pair, build_graph, ordered_pair
from barnraise.topology.link_estimate import (
    AGAIN_S,
    MOST_BYTES,
    MOST_SECONDS,
    RETRY_S,
    MeasuredLink,
    estimate,
    next_measurement,
    next_piece,
    why_measure,
)
from tests.unit.topology.graphs import mesh, node

NOW = 1e6


def test_next_measurement_returns_each_pair_once() -> None:
    graph, last = mesh(4, mbps=None), dict[Pair, MeasuredLink]()
    order = []
    while (pair := next_measurement(graph, NOW, (), last)) is not None:
        order.append(pair)
        last[pair] = MeasuredLink(NOW, 0.0004)
    assert order == sorted(graph.missing_pairs() or [(link.a, link.b) for link in graph.links])
    assert len(order) == 6
    assert next_measurement(graph, NOW + AGAIN_S - 1, (), last) is None
    assert next_measurement(graph, NOW + AGAIN_S, (), last) == order[0]


def test_next_measurement_repeats_oldest_first() -> None:
    graph = mesh(3)
    last = {(link.a, link.b): MeasuredLink(NOW - place, 0.0004) for place, link in enumerate(graph.links)}
    oldest = (graph.links[-1].a, graph.links[-1].b)
    assert next_measurement(graph, NOW + AGAIN_S, (), last) == oldest


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 7),
    st.sets(st.integers(0, 6)),
    st.sets(
        st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda pair: pair[0] != pair[1]), max_size=4
    ),
    st.sets(
        st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda pair: pair[0] != pair[1]), max_size=4
    ),
)
def test_next_measurement_skips_busy_machines(
    count: int, busy: set[int], running: set[tuple[int, int]], requested: set[tuple[int, int]]
) -> None:
    under_way = [(node(a), node(b)) for a, b in running]
    wishes = {ordered_pair(node(a), node(b)) for a, b in requested}
    in_runs = {node(number) for number in busy}
    graph = mesh(count)
    pair = next_measurement(graph, NOW, in_runs, {}, under_way=under_way, requested=wishes)
    occupied = {end for ends in under_way for end in ends}
    allowed = [
        (link.a, link.b)
        for link in graph.links
        if not occupied & {link.a, link.b} and ((link.a, link.b) in wishes or not in_runs & {link.a, link.b})
    ]
    assert pair is None if not allowed else pair in allowed
    if wishes & set(allowed):
        assert pair in wishes, "what a person asked for goes first"


def test_next_measurement_of_asked_pair_is_due_at_once() -> None:
    graph = mesh(2)
    pair = (node(0), node(1))
    last = {pair: MeasuredLink(NOW - 1, 0.0004)}
    assert next_measurement(graph, NOW, (), last) is None
    assert next_measurement(graph, NOW, (), last, requested=[pair[::-1]]) == pair


def test_next_measurement_skips_pair_without_link() -> None:
    assert next_measurement(build_graph(mesh(3).nodes), NOW, (), {}) is None


def test_reason_to_measure_is_named() -> None:
    link = mesh(2, rtt_s=0.010).links[0]
    assert why_measure(link, None, NOW) == "it was never measured"
    assert why_measure(link, MeasuredLink(NOW - RETRY_S, 0.010), NOW) is None
    assert why_measure(link, MeasuredLink(NOW - RETRY_S, 0.010, succeeded=False), NOW) is not None
    assert why_measure(link, MeasuredLink(NOW - RETRY_S + 1, 0.010, succeeded=False), NOW) is None
    assert "5 ms to 10 ms" in (why_measure(link, MeasuredLink(NOW - RETRY_S, 0.005), NOW) or "")
    assert why_measure(link, MeasuredLink(NOW - RETRY_S + 1, 0.005), NOW) is None
    assert "6 h ago" in (why_measure(link, MeasuredLink(NOW - AGAIN_S, 0.010), NOW) or "")
    # A tenth of a millisecond more on a LAN is chance, although it doubled.
    near = msgspec.structs.replace(link, rtt_s=0.0002)
    assert why_measure(near, MeasuredLink(NOW - RETRY_S, 0.0001), NOW) is None


def _train(mbps: float, chunk: int = 64 * 1024, begin: float = 5.0) -> list[tuple[float, int]]:
    """Return the arrivals on a link of constant rate, until nothing more would be sent."""
    step = chunk * 8 / (mbps * 1e6)
    count = min(MOST_BYTES // chunk, int(MOST_SECONDS / step) + 1)
    return [(begin + number * step, chunk) for number in range(count)]


@pytest.mark.parametrize("mbps", [5.0, 20.0, 94.0, 940.0, 9400.0])
def test_estimate_of_constant_rate_is_exact(mbps: float) -> None:
    result = estimate(_train(mbps, chunk=16 * 1024))
    assert result.mbps == pytest.approx(mbps, rel=0.01)
    assert result.spread < 0.01
    assert result.enough


@pytest.mark.parametrize("mbps", [20.0, 300.0, 940.0])
def test_estimate_of_steady_link_is_enough_early(mbps: float) -> None:
    train = _train(mbps, chunk=16 * 1024)
    first = next(place for place in range(1, len(train)) if estimate(train[:place]).enough)
    result = estimate(train[:first])
    assert result.reason == "the figure is steady"
    assert result.seconds < 0.2
    assert result.mbps == pytest.approx(mbps, rel=0.05)


def test_estimate_ignores_slow_start() -> None:
    fast = _train(940.0)[: 2 * 1024 // 64]
    # A seventh of all bytes at a seventh of the speed.
    slow = [(4.9 + number * 0.001, 16 * 1024) for number in range(22)]
    fast = [(time - fast[0][0] + slow[-1][0], size) for time, size in fast]
    result = estimate([*slow, *fast[1:]])
    assert result.mbps == pytest.approx(940, rel=0.02)
    assert result.spread < 0.02


def test_estimate_ignores_stall_and_burst() -> None:
    train = _train(300.0)
    # For a third of the time the receiver's core was taken away; then all that waited came at once.
    stall = (train[0][0] + 0.1, train[0][0] + 0.25)
    late = [(stall[1] if stall[0] <= time <= stall[1] else time, size) for time, size in train]
    result = estimate(late)
    assert result.mbps == pytest.approx(300, rel=0.15)


@settings(max_examples=60, deadline=None)
@given(st.floats(5, 5000), st.integers(0, 1000))
def test_estimate_with_jitter_keeps_rate(mbps: float, seed: int) -> None:
    chance = random.Random(seed)
    train = _train(mbps, chunk=16 * 1024)
    step = train[1][0] - train[0][0]
    noisy = sorted((time + chance.uniform(0, 2 * step), size) for time, size in train)
    result = estimate(noisy)
    assert result.mbps == pytest.approx(mbps, rel=0.15)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 1 << 20)), max_size=40))
def test_estimate_of_any_arrivals_is_finite(train: list[tuple[float, int]]) -> None:
    result = estimate(sorted(train))
    assert result.mbps is None or result.mbps > 0
    assert result.spread >= 0
    if result.received >= MOST_BYTES or result.seconds >= MOST_SECONDS:
        assert result.enough


def test_estimate_of_too_few_bytes_is_none() -> None:
    assert estimate([]).mbps is None
    assert estimate([(0.0, 1000)]).reason == "too few bytes have arrived yet"
    ended = estimate([(0.0, 1000), (1.5, 1000)])
    assert (ended.mbps, ended.enough, ended.reason) == (None, True, "too few bytes arrived for an estimate")


@pytest.mark.parametrize("mbps", [0.1, 0.3, 1.0, 10.0, 100.0, 1000.0, 10_000.0])
@pytest.mark.parametrize("rtt_s", [0.0004, 0.03])
def test_sender_and_receiver_together_limit_traffic(mbps: float, rtt_s: float) -> None:
    """On a link with a deep buffer, bytes arrive late, and too many would clog it for seconds."""
    speed = mbps * 1e6 / 8
    sent = received = 0
    free_at = now = 0.0
    on_the_way: list[tuple[float, int]] = []
    train: list[tuple[float, int]] = []
    looked_at = 0
    while True:
        while on_the_way and on_the_way[0][0] + rtt_s / 2 <= now:
            received += on_the_way.pop(0)[1]
        if received >= looked_at + 128 * 1024:
            looked_at = received
            if estimate([entry for entry in train if entry[0] + rtt_s / 2 <= now]).enough:
                break
        if now > 1.5:
            break
        allowed = next_piece(sent, received, now)
        if allowed > 0:
            free_at = max(free_at, now) + allowed / speed
            arrival = (free_at + rtt_s / 2, allowed)
            on_the_way.append(arrival)
            train.append(arrival)
            sent += allowed
        else:
            now = on_the_way[0][0] + rtt_s / 2 if on_the_way else now + 0.01
    assert sent <= MOST_BYTES
    if mbps >= 1:
        assert free_at <= MOST_SECONDS + 0.6, "the line is quiet again soon after"
    assert free_at <= MOST_SECONDS + 3.0
    result = estimate(train)
    if mbps <= 1000:
        assert result.mbps == pytest.approx(mbps, rel=0.15)
