"""The membership under random faults on a fake clock.

``benchmarks.simulation.membership.schedules`` replays a seed.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Collection, Iterable, Iterator

import msgspec
import pytest

from barnraise.identity.trust import encode_entry
from barnraise.membership import history
from barnraise.membership import node as node_module
from barnraise.membership.consensus import paxos
from barnraise.membership.consensus.certificate import CertifiedDecision
from barnraise.membership.consensus.paxos import (
    BRANCH_BITS,
    AcceptorState,
    PaxosPrepare,
    PaxosPromise,
    PaxosReply,
)
from barnraise.membership.effects import LogNote
from barnraise.membership.messages import DecisionMessage
from benchmarks.simulation.membership.cluster import Cluster, keys
from benchmarks.simulation.membership.schedules import forming_time, message_cost, run_many, run_schedule

_SABOTEURS = 400


def _faults(count: int = _SABOTEURS) -> Iterator[str]:
    return (fault for seed in range(count) if (fault := run_schedule(seed).fault) is not None)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_schedules_ten_thousand_keep_the_invariants(seeds: Callable[[int], Iterable[int]]) -> None:
    first = int(os.environ.get("SCHEDULES_FIRST", "0"))
    tried = [first + seed for seed in seeds(10_000)]
    faults = [outcome for outcome in run_many(tried) if outcome.fault is not None]
    assert not faults, [
        f"python -m benchmarks.simulation.membership.schedules --verbose --seed {outcome.seed}"
        for outcome in faults
    ]


def test_random_schedules_few_keep_the_invariants() -> None:
    assert list(_faults(40)) == []


def test_seed_determines_the_schedule() -> None:
    assert [run_schedule(seed) for seed in range(20)] == [run_schedule(seed) for seed in range(20)]


@pytest.mark.slow
def test_two_halves_that_both_decide_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedules can fail: with a wrong quorum they do."""

    def half(voters: Collection[bytes], agreeing: Collection[bytes], absent: Collection[bytes] = ()) -> bool:
        return 2 * sum(node in agreeing for node in voters) >= len(voters)

    monkeypatch.setattr(paxos, "is_quorum", half)
    monkeypatch.setattr(node_module, "is_quorum", half)
    assert any("two views" in fault for fault in _faults())


@pytest.mark.slow
def test_forgotten_vote_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = paxos.answer_prepare

    def forgetful(record: AcceptorState, me: bytes, question: PaxosPrepare) -> PaxosReply:
        reply, kept = honest(record, me, question)
        if isinstance(reply, PaxosPromise):
            reply = msgspec.structs.replace(reply, accepted=None)
        return PaxosReply(reply, kept)

    monkeypatch.setattr(paxos, "answer_prepare", forgetful)
    assert any("two views" in fault for fault in _faults(3000))


def test_vote_that_is_not_on_disk_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "SaveState", lambda record, *rest: LogNote("not kept"))
    assert any(_faults(50))


@pytest.mark.parametrize("sides", [([0, 1], [2, 3]), ([0, 1, 2], [3]), ([0], [1, 2, 3])])
def test_only_the_right_side_of_a_split_goes_on(sides: tuple[list[int], list[int]]) -> None:
    cluster = Cluster(1, 4)
    cluster.run(3.0)
    before = len(cluster.decided)
    cluster.split(*sides)
    cluster.run(6.0)
    right = sides[0] if len(sides[0]) > 1 else sides[1]
    for node in cluster.nodes:
        assert node.member is not None
        standing = node.member.quorum_status(cluster.now)
        if node.index in right:
            assert [cluster.by_raw[raw].index for raw in node.member.view.nodes] == right
            assert standing.decides
        else:
            assert not standing.decides
            assert standing.needed
    assert len(cluster.decided) == before + 1
    cluster.heal()
    cluster.run(5.0)
    assert cluster.agreed()


def test_two_machines_survive_the_death_of_either() -> None:
    """The senior goes on alone; the junior waits, unless the senior said goodbye or the user says so."""
    cluster = Cluster(1, 2)
    cluster.run(2.0)
    senior, junior = cluster.nodes
    cluster.crash(junior, refuses=False)
    cluster.run(4.0)
    assert senior.member is not None
    assert senior.member.view.nodes == (senior.raw,)
    cluster.start(junior)
    cluster.run(4.0)
    assert cluster.agreed()
    cluster.crash(senior, refuses=False)
    cluster.run(4.0)
    assert junior.member is not None
    assert junior.member.view.nodes == (senior.raw, junior.raw)
    assert junior.member.quorum_status(cluster.now).needed == (senior.raw,)
    cluster.perform(junior, junior.member.continue_without, [senior.raw])
    assert junior.member.view.nodes == (junior.raw,)
    assert junior.member.record.decided.branch >> BRANCH_BITS == 1
    cluster.start(senior)
    cluster.run(4.0)
    assert cluster.agreed()
    assert junior.member.view.nodes == (junior.raw, senior.raw)


def test_node_of_a_large_cluster_that_hears_of_a_newer_decision_takes_no_orders() -> None:
    """Most of 20 machines are not watched: their links alone must not confirm an old view."""
    cluster = Cluster(1, 20)
    cluster.run(3.0)
    member = cluster.nodes[5].member
    assert member is not None
    assert member.is_current(cluster.now)
    sender, peer = next((raw, peer) for raw, peer in member.peers.items() if peer.beat is not None)
    assert peer.beat is not None
    newer = msgspec.structs.replace(
        peer.beat, serial=peer.beat.serial + 1, number=peer.beat.number + 1, view=b"n" * 32
    )
    member.receive(sender, newer, cluster.now)
    assert not member.is_current(cluster.now)


def test_leaving_coordinator_passes_on_seniority() -> None:
    cluster = Cluster(1, 2)
    cluster.run(2.0)
    senior, junior = cluster.nodes
    cluster.leave(senior)
    cluster.run(0.5)
    assert junior.member is not None
    assert junior.member.view.nodes == (junior.raw,)


def test_forced_branch_beats_decisions_of_the_absent() -> None:
    cluster = Cluster(1, 2)
    cluster.run(2.0)
    senior, junior = cluster.nodes
    cluster.split([0], [1])
    cluster.run(5.0)
    assert senior.member is not None
    assert senior.member.view.nodes == (senior.raw,)
    assert junior.member is not None
    cluster.perform(junior, junior.member.continue_without, [senior.raw])
    cluster.heal()
    cluster.run(5.0)
    assert cluster.agreed()
    assert senior.member.record.decided.branch >> BRANCH_BITS == 1
    assert any("dropped" in text for _, index, text in cluster.notes if index == 0)


def test_stopped_coordinator_is_replaced_and_returns() -> None:
    times = []
    for seed in range(30):
        cluster = Cluster(seed, 4)
        cluster.run(3.0 + random.Random(seed).random())
        victim = cluster.nodes[0]
        begin = cluster.now
        cluster.stall(victim, 8.0)
        others = cluster.nodes[1:]
        while any(node.member is not None and victim.raw in node.member.view.nodes for node in others):
            cluster.run(0.05)
            assert cluster.now < begin + 5.0
        times.append(cluster.now - begin)
        cluster.run(12.0)
        assert cluster.agreed()
    assert sorted(times)[15] < 3.0


def test_flapping_link_between_two_of_four_evicts_no_member() -> None:
    cluster = Cluster(5, 4)
    cluster.run(3.0)
    before = len(cluster.decided)
    for _ in range(6):
        cluster.cut = {(0, 2), (2, 0)}
        cluster.run(3.0)
        cluster.cut = set()
        cluster.run(7.0)
    assert len(cluster.decided) == before
    assert cluster.agreed()


def test_cluster_recovers_from_a_power_cut() -> None:
    cluster = Cluster(3, 5)
    cluster.run(2.0)
    for node in cluster.nodes:
        cluster.crash(node, refuses=False)
    cluster.run(5.0)
    for node in cluster.nodes:
        cluster.later(cluster.rng.uniform(0.0, 2.0), lambda node=node: cluster.start(node))  # type: ignore[misc]
    cluster.run(8.0)
    assert cluster.agreed()


def test_guest_neither_votes_nor_decides() -> None:
    cluster = Cluster(4, 3, guests=1)
    cluster.run(3.0)
    guest = cluster.nodes[2]
    owner = cluster.nodes[0]
    assert guest.member is not None
    assert owner.member is not None
    assert guest.raw not in owner.member.view.voters
    number = owner.member.record.decided.number
    decision = msgspec.structs.replace(owner.member.record.decided, number=number + 1)
    forged = DecisionMessage((CertifiedDecision(decision),))
    cluster.perform(owner, owner.member.receive, guest.raw, forged)
    assert owner.member.record.decided.number == number
    assert any("guest" in text for _, _, text in cluster.notes)


def test_revoked_machine_is_evicted_first_and_never_returns() -> None:
    cluster = Cluster(6, 3)
    cluster.run(3.0)
    owner, out = cluster.nodes[0], cluster.nodes[2]
    assert owner.member is not None
    assert out.member is not None
    entry = owner.member.log.revoke(keys(3)[0], keys(3)[2].id)
    cluster.wish(owner, encode_entry(entry))
    cluster.run(4.0)
    assert owner.member.log.role(keys(3)[2].id) is None
    assert out.raw not in owner.member.view.nodes
    assert len(out.member.log.entries) == 3, "the removed one was shown the new secret"
    cluster.run(10.0)
    assert out.raw not in owner.member.view.nodes


@pytest.mark.slow
def test_large_clusters_form_and_stay_cheap() -> None:
    assert forming_time(8) < 3.0
    assert message_cost(8) < 20
    assert message_cost(64) < 20


@pytest.mark.slow
def test_two_hundred_form_a_view() -> None:
    assert forming_time(200) < 30.0
    assert message_cost(200) < 20


def _off(cluster: Cluster, *places: int) -> None:
    for place in places:
        cluster.crash(cluster.nodes[place], refuses=False)


def test_stall_does_not_bring_back_machines_that_are_off() -> None:
    cluster = Cluster(1, 5)
    cluster.run(2.0)
    for place in (2, 3, 4):
        _off(cluster, place)
        cluster.run(5.0)
    senior = cluster.nodes[0]
    assert senior.member is not None
    assert len(senior.member.view.nodes) == 2
    cluster.run(600.0)
    cluster.stall(senior, 1.3)
    cluster.run(10.0)
    assert len(senior.member.view.nodes) == 2
    assert senior.member.quorum_status(cluster.now).decides


@pytest.mark.parametrize(("count", "back"), [(2, [0]), (4, [0, 3]), (5, [1, 2, 4])])
def test_machines_that_return_after_a_power_cut_continue_with_a_quorum(count: int, back: list[int]) -> None:
    cluster = Cluster(2, count)
    cluster.run(2.0)
    _off(cluster, *range(count))
    cluster.run(60.0)
    for place in back:
        cluster.start(cluster.nodes[place])
    cluster.run(10.0)
    assert cluster.agreed()
    member = cluster.nodes[back[0]].member
    assert member is not None
    assert member.quorum_status(cluster.now).decides


def test_guest_cannot_stop_the_cluster() -> None:
    """The guest speaks in another name, reports absent visitors, and suspects all members."""
    cluster = Cluster(3, 4, guests=1)
    cluster.run(2.0)
    guest = cluster.nodes[3]
    _off(cluster, 2)
    cluster.run(4.0)
    first = cluster.nodes[0]
    assert first.member is not None
    assert guest.member is not None
    honest = guest.member._heartbeat_for(first.raw, (), cluster.now)
    absent = msgspec.structs.replace(first.member.me, node=cluster.nodes[2].raw, incarnation=b"x" * 16)
    for serial in range(20):
        lies = [
            msgspec.structs.replace(honest, me=first.member.me, serial=10_000 + serial),
            msgspec.structs.replace(
                honest,
                serial=10_000 + serial,
                visitors=(absent,),
                suspects=tuple(node.raw for node in cluster.nodes),
            ),
        ]
        for lie in lies:
            for node in cluster.nodes[:2]:
                assert node.member is not None
                cluster.perform(node, node.member.receive, guest.raw, lie)
        cluster.run(0.5)
    assert cluster.nodes[2].raw not in first.member.view.nodes
    assert {node.raw for node in cluster.nodes[:2]} <= set(first.member.view.nodes)
    assert first.member.quorum_status(cluster.now).decides


def test_two_words_on_two_sides_end_in_one_branch() -> None:
    cluster = Cluster(4, 4)
    cluster.run(2.0)
    cluster.split([0, 1], [2], [3])
    cluster.run(4.0)
    for place in (2, 3):
        node = cluster.nodes[place]
        assert node.member is not None
        others = [other.raw for other in cluster.nodes if other is not node]
        cluster.perform(node, node.member.continue_without, others)
        assert node.member.view.nodes == (node.raw,)
    cluster.heal()
    cluster.run(15.0)
    assert cluster.agreed()


def test_branch_brings_its_own_trust_log() -> None:
    """One side admits a machine while the user goes on without that side: the admission is undone."""
    cluster = Cluster(5, 2)
    cluster.run(2.0)
    senior, junior = cluster.nodes
    cluster.split([0], [1])
    cluster.run(4.0)
    assert senior.member is not None
    assert junior.member is not None
    stranger = keys(9)[8].id
    entry = senior.member.log.admit(keys(2)[0], stranger, "owner", "x")
    cluster.wish(senior, encode_entry(entry))
    cluster.run(2.0)
    assert senior.member.log.role(stranger) == "owner"
    cluster.perform(junior, junior.member.continue_without, [senior.raw])
    cluster.heal()
    cluster.run(6.0)
    assert cluster.agreed()
    assert senior.member.log.role(stranger) is None
    assert senior.member.log == junior.member.log
    assert len(senior.disk.entries) == len(senior.member.log.entries)


def test_removed_coordinator_does_not_see_the_new_secret() -> None:
    cluster = Cluster(6, 3)
    cluster.run(3.0)
    out, owner = cluster.nodes[0], cluster.nodes[1]
    assert out.member is not None
    assert owner.member is not None
    cluster.wish(owner, encode_entry(owner.member.log.revoke(keys(3)[1], keys(3)[0].id)))
    cluster.run(5.0)
    assert owner.member.log.role(keys(3)[0].id) is None
    assert len(out.member.log.entries) == 3


def test_large_cluster_detects_a_partition() -> None:
    cluster = Cluster(7, 20)
    cluster.run(2.0)
    few, many = list(range(6)), list(range(6, 20))
    cluster.split(few, many)
    for minority_index in few:
        for majority_index in many:
            for here, there in ((minority_index, majority_index), (majority_index, minority_index)):
                member = cluster.nodes[here].member
                assert member is not None
                member.link_down(cluster.nodes[there].raw)
    cluster.run(8.0)
    for node in cluster.nodes:
        assert node.member is not None
        assert node.member.quorum_status(cluster.now).decides == (node.index in many)
    cluster.heal()
    for minority_index in few:
        for majority_index in many:
            cluster.link(cluster.nodes[minority_index], cluster.nodes[majority_index])
    cluster.run(20.0)
    assert cluster.agreed()


@pytest.mark.parametrize("victims", list(itertools.combinations(range(5), 2)))
def test_any_two_of_five_may_die_at_once(victims: tuple[int, int]) -> None:
    cluster = Cluster(8, 5)
    cluster.run(2.0)
    _off(cluster, *victims)
    cluster.run(6.0)
    assert cluster.agreed()
    for victim in victims:
        cluster.start(cluster.nodes[victim])
    cluster.run(6.0)
    assert cluster.agreed()
