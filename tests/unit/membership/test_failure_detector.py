"""Failure detector: timeouts are learned, and a death needs two observers if there are two."""

from __future__ import annotations

import random

from barnraise.membership.failure_detector import (
    HEARTBEAT_S,
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
    FailureDetector,
    judged_dead,
    watched,
)

A, B, C, D = (bytes([number]) * 32 for number in range(4))


def _hear(health: FailureDetector, now: float) -> None:
    health.beat(now)
    health.echo(now, 0.001)


def test_regular_peer_is_suspected_soon() -> None:
    health, now = FailureDetector(0.0), 0.0
    for _ in range(40):
        now += HEARTBEAT_S
        _hear(health, now)
    assert health.timeout_s == MIN_TIMEOUT_S
    assert not health.is_silent(now + 1.4)
    assert health.is_silent(now + 1.6)


def test_irregular_peer_gets_longer_timeout_up_to_limit() -> None:
    rng = random.Random(1)
    health, now = FailureDetector(0.0), 0.0
    for _ in range(200):
        now += rng.choice((0.05, 0.3, 2.2))
        _hear(health, now)
    assert health.timeout_s > 3.0
    assert health.timeout_s <= MAX_TIMEOUT_S


def test_peer_that_does_not_echo_counts_as_silent() -> None:
    health = FailureDetector(0.0)
    for tick in range(20):
        health.beat(tick * HEARTBEAT_S)
    assert health.is_silent(20 * HEARTBEAT_S)


def test_own_sleep_does_not_make_peers_silent() -> None:
    health = FailureDetector(0.0)
    _hear(health, 1.0)
    health.reset_timeout(100.0)
    assert not health.is_silent(100.5)


def test_judged_dead_needs_two_observers() -> None:
    nodes = [A, B, C, D]
    assert judged_dead(nodes, {D}, {B: (), C: ()}) == frozenset()
    assert judged_dead(nodes, {D}, {B: (D,), C: ()}) == {D}
    assert judged_dead(nodes, set(), {B: (D,), C: ()}) == frozenset()
    assert judged_dead(nodes, set(), {B: (D,), C: (D,)}) == {D}


def test_judged_dead_by_one_observer_without_others() -> None:
    assert judged_dead([A, B], {B}, {}) == {B}
    assert judged_dead([A, B, C], {B, C}, {}) == {B, C}


def test_judged_dead_ignores_reports_of_suspects() -> None:
    assert judged_dead([A, B, C], {B}, {B: (C,)}) == {B}


def test_large_cluster_watches_each_node_by_eight() -> None:
    nodes = [number.to_bytes(32, "big") for number in range(100)]
    watchers = dict.fromkeys(nodes, 0)
    for node in nodes:
        for other in watched(nodes, node):
            assert node in watched(nodes, other)
            watchers[other] += 1
    assert set(watchers.values()) == {8}
    assert len(watched(nodes[:16], nodes[0])) == 15
