"""Machines that stand still or lose all links: which of them hold all others for dead, and decide alone.

The controller of runs asks between the ticks of the membership, also first after a standstill.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from barnraise.membership.failure_detector import HEARTBEAT_S, MIN_TIMEOUT_S
from barnraise.membership.node import TICK_S
from barnraise.runs.control.lifecycle import reason_to_decide_alone
from barnraise.runs.record import RunRecord, WorkerSlot
from benchmarks.simulation.membership.cluster import Cluster, Node

_ASKS_S = 0.05


def decides_alone(cluster: Cluster, node: Node) -> str | None:
    """Return why the controller on this machine may continue a run on all machines without a quorum."""
    member = node.member
    assert member is not None
    slots = tuple(WorkerSlot(other.raw, 0, "cpu", 1) for other in cluster.nodes)
    record = RunRecord(order=b"", signature=bytes(64), phase="running", generation=1, slots=slots)
    standing = member.quorum_status(cluster.now)
    if standing.decides:
        return None
    dead = member.dead(cluster.now)
    return reason_to_decide_alone(record, node.raw, member.view.nodes, standing.missing, dead)


def alone(cluster: Cluster) -> list[int]:
    """Return the machines that run now and may decide alone."""
    return [
        node.index
        for node in cluster.nodes
        if node.member is not None and node.asleep_until <= cluster.now and decides_alone(cluster, node)
    ]


def formed(seed: int) -> Cluster:
    cluster = Cluster(seed, 3)
    cluster.run(3.0 + 0.037 * seed)
    assert cluster.agreed()
    return cluster


def ask_first_after(cluster: Cluster, standstill_s: float) -> list[int]:
    """Let all machines stand still together, and return which decide alone before their next tick."""
    deciding: list[int] = []
    cluster.later(standstill_s, lambda: deciding.extend(alone(cluster)))
    for node in cluster.nodes:
        cluster.stall(node, standstill_s)
    cluster.run(standstill_s)
    return deciding


def starve(cluster: Cluster, rng: random.Random, longest_s: float) -> list[int]:
    """Let each machine run for some milliseconds between standstills; return which ever decide alone."""
    deciding: list[int] = []

    def wake(node: Node) -> None:
        if decides_alone(cluster, node):
            deciding.append(node.index)
        cluster.later(rng.uniform(0.005, 0.05), lambda: stop(node))

    def stop(node: Node) -> None:
        seconds = rng.uniform(longest_s / 2, longest_s)
        cluster.later(seconds, lambda: wake(node))
        cluster.stall(node, seconds)

    for node in cluster.nodes:
        stop(node)
    cluster.run(30.0)
    return deciding


@pytest.mark.parametrize("standstill_s", [0.5, 0.9, 1.2, 2.0, 5.0, 60.0])
def test_machines_that_stood_still_together_hold_no_other_for_dead(standstill_s: float) -> None:
    """One busy host may stop all its processes for seconds. Then each has heard nothing."""
    for seed in range(10):
        cluster = formed(seed)
        views = len(cluster.decided)
        assert ask_first_after(cluster, standstill_s) == []
        for _ in range(100):
            cluster.run(_ASKS_S)
            assert alone(cluster) == []
        assert len(cluster.decided) == views


@pytest.mark.parametrize("longest_s", [0.6, 1.0, 2.0, 6.0])
def test_starved_machines_never_decide_alone(longest_s: float, seeds: Callable[[int], Iterable[int]]) -> None:
    for seed in seeds(10):
        assert starve(formed(seed % 10), random.Random(seed), longest_s) == [], f"seed {seed}"


def test_death_of_two_is_noticed_as_fast_as_before() -> None:
    """The machine that is left watches them, so its own ticks delay nothing."""
    for seed in range(10):
        cluster = formed(seed)
        for node in cluster.nodes[:2]:
            cluster.crash(node, refuses=False)
        begun = cluster.now
        while not alone(cluster):
            cluster.run(0.01)
        assert cluster.now - begun <= MIN_TIMEOUT_S + HEARTBEAT_S + TICK_S
        assert alone(cluster) == [2]


def test_refused_connections_show_at_once_that_two_have_ended() -> None:
    cluster = formed(1)
    for node in cluster.nodes[:2]:
        cluster.crash(node, refuses=True)
    cluster.run(0.5)
    assert alone(cluster) == [2]


def test_machines_that_lose_all_links_each_decide_alone_and_one_history_counts() -> None:
    """No machine can tell that from the death of the others: docs/failure.md says so."""
    cluster = formed(1)
    views = len(cluster.decided)
    cluster.split([0], [1], [2])
    cluster.run(3.0)
    assert alone(cluster) == [0, 1, 2]
    assert len(cluster.decided) == views, "none has a quorum, so no view follows"
    cluster.heal()
    cluster.run(5.0)
    assert alone(cluster) == []
    assert cluster.agreed()
