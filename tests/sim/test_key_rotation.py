"""Machines that change their key in place: the cluster goes on, and the old key is dead."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial

import pytest

from barnraise.core.errors import TrustError
from barnraise.identity import NodeKey
from barnraise.identity.trust import encode_entry
from barnraise.membership.messages import Goodbye, TrustProposal
from benchmarks.simulation.membership.cluster import Cluster, Node, keys

_SPARE = 30  # keys of no node


def _new_key(seed: int) -> NodeKey:
    return keys(40)[_SPARE + seed % 10]


def _rotated(cluster: Cluster, node: Node, seed: int, seconds: float = 8.0) -> NodeKey:
    """Let a node change its key, and return the old one."""
    old, new = node.key, _new_key(seed)
    cluster.rotate(node, new)
    cluster.run(seconds)
    assert node.key is new, f"seed {seed}: the key was not changed"
    return old


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("place", [0, -1])
def test_machine_keeps_role_name_and_seniority_of_its_admission(count: int, place: int) -> None:
    for seed in range(5):
        cluster = Cluster(seed, count)
        cluster.run(2.0)
        node = cluster.nodes[place]
        assert node.member is not None
        before = node.member.log.members[node.key.id]
        order = list(node.member.log.members)
        old = _rotated(cluster, node, seed)
        assert cluster.agreed(), f"seed {seed}"
        for other in cluster.nodes:
            assert other.member is not None
            log = other.member.log
            assert log.role(old.id) is None
            assert old.id in log.revoked
            assert log.members[node.key.id] == before
            assert list(log.members) == [node.key.id if each == old.id else each for each in order]
            assert log.current(old.id) == node.key.id


def test_rotation_under_loss_delay_and_doubled_messages_is_decided_once(
    seeds: Callable[[int], Iterable[int]],
) -> None:
    for seed in seeds(40):
        rng = random.Random(seed)
        cluster = Cluster(seed, rng.randint(2, 5))
        cluster.run(2.0)
        cluster.loss, cluster.doubled, cluster.delay = 0.1, 0.1, (0.0005, 0.2)
        node = rng.choice(cluster.nodes)
        cluster.rotate(node, _new_key(seed))
        cluster.run(20.0)
        cluster.heal()
        cluster.run(20.0)
        assert node.key is _new_key(seed), f"seed {seed}"
        assert cluster.agreed(), f"seed {seed}"


def test_machine_that_slept_learns_the_new_key_from_another_owner() -> None:
    for seed in range(10):
        cluster = Cluster(seed, 4)
        cluster.run(2.0)
        sleeper = cluster.nodes[3]
        cluster.crash(sleeper)
        cluster.run(3.0)
        old = _rotated(cluster, cluster.nodes[seed % 3], seed)
        cluster.start(sleeper)
        cluster.run(8.0)
        assert cluster.agreed(), f"seed {seed}"
        assert sleeper.member is not None
        assert sleeper.member.log.role(old.id) is None


def test_old_key_decides_nothing_afterwards() -> None:
    """Tries the stolen old key: it votes, proposes, says goodbye for the machine, and rotates once more."""
    for seed in range(10):
        cluster = Cluster(seed, 3)
        cluster.run(2.0)
        node, other = cluster.nodes[seed % 3], cluster.nodes[(seed + 1) % 3]
        assert node.member is not None
        stale = node.member.log
        old = _rotated(cluster, node, seed)
        assert other.member is not None
        log, digest = other.member.log, other.member.record.digest
        thief = keys(40)[20]
        for entry in (
            stale.admit(old, thief.id, "owner", "thief"),
            stale.rotate(old, thief),
            stale.revoke(old, other.key.id),
        ):
            with pytest.raises(TrustError):
                log.extended(entry)
            cluster.perform(other, other.member.receive, old.id.raw, TrustProposal(encode_entry(entry)))
        cluster.perform(other, other.member.receive, old.id.raw, Goodbye(bytes(16)))
        with pytest.raises(TrustError, match="not an owner"):
            log.rotate(old, thief)
        cluster.run(5.0)
        assert other.member.record.digest == digest
        assert cluster.agreed(), f"seed {seed}"


def test_removal_and_rotation_at_once_leave_one_history(seeds: Callable[[int], Iterable[int]]) -> None:
    """Tries to escape a removal with a new key: the removal follows the machine to that key."""
    for seed in seeds(40):
        rng = random.Random(seed)
        cluster = Cluster(seed, 4)
        cluster.run(2.0)
        victim, remover = cluster.nodes[1 + seed % 3], cluster.nodes[0]
        old, new = victim.key, _new_key(seed)
        cluster.later(rng.uniform(0.0, 0.05), partial(cluster.rotate, victim, new))
        for _ in range(12):
            assert remover.member is not None
            log = remover.member.log
            target = log.current(old.id)
            if log.role(target) is not None:
                cluster.wish(remover, encode_entry(log.revoke(remover.key, target)))
            cluster.run(1.0)
        assert remover.member is not None
        assert {remover.member.log.role(old.id), remover.member.log.role(new.id)} == {None}
        for other in cluster.nodes:
            if other is not victim:
                assert other.member is not None
                assert other.member.log.head == remover.member.log.head, f"seed {seed}"
