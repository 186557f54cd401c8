"""Attacks from the network of a cluster: all are rejected, and no machine is disturbed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from barnraise.agent_client.cluster_requests import RequestDone, UnpairRequest
from barnraise.discovery import namespace_tag
from benchmarks.agents.machines import Machines
from benchmarks.attacks.guest import SELVES
from lab import Lab
from tests.lab.attacked_cluster import (
    ALLOCATOR_ENVIRONMENT,
    MAX_GROWTH,
    OWNERS,
    AttackedCluster,
    members,
    restore_after_failure,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

DISCOVERY_PORT = 52415
MAX_WAITING = 128 + 64  # connections without a preface, and handshakes


@pytest.fixture(scope="module")
def cluster() -> Iterator[AttackedCluster]:
    with Lab(hosts=5) as lab, Machines(lab.hosts[:3]) as machines:
        machines.extra |= ALLOCATOR_ENVIRONMENT
        machines.form()
        yield AttackedCluster(lab, machines)


# pairing


@restore_after_failure
def test_pairing_code_allows_one_guess(cluster: AttackedCluster) -> None:
    with cluster.undisturbed():
        code = cluster.pairing_code()
        number, first, second = code.split("-")
        wrong = f"{number}-{second}-{first}" if first != second else f"{number}-acrobat-zebra"
        assert not cluster.join(wrong, cluster.stranger)["joined"]
        cluster.await_burned_code()
        assert not cluster.join(code, cluster.stranger)["joined"], "the right code, too late"


@restore_after_failure
def test_replayed_pairing_opens_nothing(cluster: AttackedCluster) -> None:
    record = cluster.new_path()
    with cluster.undisturbed(decisions=1):
        code = cluster.pairing_code()
        port = cluster.new_port()
        relay = cluster.start(
            cluster.stranger, "relay", listen=port, record=record, **cluster.target
        ).await_ready()
        assert cluster.join(code, host=cluster.stranger.address, port=port)["joined"], (
            "a relay that changes nothing does no harm"
        )
        cluster.await_result(relay)
    with cluster.undisturbed():
        number = int(cluster.pairing_code().split("-")[0])
        heard = cluster.attack("replay", record=record, number=number, **cluster.target)
        assert heard["as_it_was"] == 0, "no byte in reply"
        cluster.await_burned_code()


@pytest.mark.parametrize(("way", "at"), [("up", 120), ("down", 50), ("up", 250)])
@restore_after_failure
def test_pairing_with_changed_byte_fails(cluster: AttackedCluster, way: str, at: int) -> None:
    """In the joiner's half of the exchange, in the offerer's half, and in the joiner's sealed proof."""
    with cluster.undisturbed():
        code = cluster.pairing_code()
        port = cluster.new_port()
        relay = cluster.start(
            cluster.stranger, "relay", listen=port, way=way, at=at, **cluster.target
        ).await_ready()
        assert not cluster.join(code, host=cluster.stranger.address, port=port)["joined"]
        assert cluster.await_result(relay)[way] > at
        # An invalid half of an exchange is not a guess, so the code may stay open.
        cluster.machines.until(
            lambda: cluster.offer_state() in ("burned", "open"), 30.0, "the exchange is over"
        )


# discovery and TLS


@pytest.fixture(scope="module")
@restore_after_failure
def stolen(cluster: AttackedCluster) -> dict[str, Any]:
    """Advertise the cluster's tag as an attacker, answer the callers, and show their preface to others."""
    with cluster.undisturbed():
        tag, port = namespace_tag(cluster.trust_log().secret), cluster.new_port()
        return cluster.attack("steal_advert", tag=tag, listen=port, agents=cluster.endpoints, seconds=2.0)


def test_copied_advert_gets_preface_only(stolen: dict[str, Any]) -> None:
    assert stolen["callers"] >= 1
    assert stolen["certificates"] == 0


def test_replayed_preface_is_rejected(stolen: dict[str, Any]) -> None:
    assert stolen["replayed"] >= 3
    assert stolen["certificates_of_agents"] == 0
    assert stolen["answered"] == 0


@restore_after_failure
def test_unknown_key_is_not_a_member(cluster: AttackedCluster) -> None:
    """The stranger knows the discovery secret, and once also the node id of a member."""
    known = {"agents": cluster.endpoints, "trusted": cluster.nodes, "times": 10}
    secret = cluster.trust_log().secret.hex()
    with cluster.undisturbed():
        assert cluster.attack("come_as_member", secrets=[secret], **known)["entered"] == 0
        forged = cluster.attack("come_as_member", secrets=[secret], claims=cluster.nodes[1], **known)
        assert forged["entered"] == 0
        assert cluster.attack("come_as_member", secrets=["00" * 32], **known)["entered"] == 0


@restore_after_failure
def test_tls_failure_names_its_source(cluster: AttackedCluster) -> None:
    secret = cluster.trust_log().secret.hex()
    cluster.attack("come_as_member", secrets=[secret], agents=cluster.endpoints, trusted=cluster.nodes)
    for place in OWNERS:
        named = cluster.await_log_lines(place, f"connection from {cluster.stranger.address}")
        assert 1 <= len(named) <= 5, "one line for each kind of failure"


@restore_after_failure
def test_removed_member_is_rejected(cluster: AttackedCluster) -> None:
    keep = cluster.new_path()
    with cluster.undisturbed(decisions=1):
        assert cluster.join(cluster.pairing_code(), cluster.stranger, keep=keep, name="thief")["joined"]
    known = {"agents": cluster.endpoints, "trusted": cluster.nodes, "keep": keep, "times": 5}
    old = cluster.trust_log().secret.hex()
    assert cluster.attack("come_as_member", secrets=[old], **known)["entered"] == 15, "while it is a member"
    with cluster.undisturbed(decisions=1, views=2):
        cluster.machines.ask(1, UnpairRequest("thief"), RequestDone)
    new = cluster.trust_log().secret.hex()
    assert new != old
    with cluster.undisturbed():
        result = cluster.attack("come_as_member", secrets=[old, new], **known)
        assert result["entered"] == 0
        assert any("does not trust" in words for words in result["words"]), "the new secret fails at TLS"
        assert any("without an answer" in words for words in result["words"]), (
            "the old secret fails at the preface"
        )


# floods, large and slow input


@restore_after_failure
def test_garbage_gets_no_answer(cluster: AttackedCluster) -> None:
    with cluster.undisturbed(descriptors=MAX_WAITING):
        result = cluster.attack(
            "garbage", agents=cluster.endpoints, secret=cluster.trust_log().secret.hex(), times=6
        )
        assert result["answered_without_preface"] == 0
    for place in OWNERS:
        named = cluster.await_log_lines(place, f"rejected {cluster.stranger.address}")
        assert 1 <= len(named) <= 3, "one line for each kind of rejection"


@restore_after_failure
def test_silent_connections_do_not_block_others(cluster: AttackedCluster) -> None:
    with cluster.undisturbed(decisions=1, descriptors=MAX_WAITING):
        code = cluster.pairing_code()
        many = {"silent": 2000, "half": 500, "max_open": MAX_WAITING}
        flood = cluster.start(cluster.stranger, "flood", seconds=6.0, **many, **cluster.target)
        flood.await_ready()
        assert cluster.join(code)["joined"]
        result = cluster.await_result(flood)
        assert result["opened"] >= 2400
        assert result["open_still"] <= MAX_WAITING


@restore_after_failure
def test_many_pairing_attempts_do_not_block_others(cluster: AttackedCluster) -> None:
    with cluster.undisturbed(decisions=1, descriptors=MAX_WAITING):
        code = cluster.pairing_code()
        number = int(code.split("-")[0])
        crowd = cluster.start(
            cluster.stranger, "crowd", number=number, people=200, seconds=4.0, **cluster.target
        )
        crowd.await_ready()
        joined = cluster.join(code)
        cluster.await_result(crowd)
        assert joined["joined"], joined["words"]


@restore_after_failure
def test_many_pairing_attempts_do_not_fill_the_log(cluster: AttackedCluster) -> None:
    with cluster.undisturbed(descriptors=MAX_WAITING):
        number = int(cluster.pairing_code().split("-")[0])
        cluster.attack("hasty", number=number, times=100, **cluster.target)


@restore_after_failure
def test_slow_senders_are_disconnected(cluster: AttackedCluster) -> None:
    with cluster.undisturbed(descriptors=MAX_WAITING):
        number, secret = int(cluster.pairing_code().split("-")[0]), cluster.trust_log().secret.hex()
        borne = cluster.attack("drip", number=number, secret=secret, **cluster.target)
        assert max(borne.values()) < 15.0, borne  # the attack itself lasts 20 s


@restore_after_failure
def test_false_datagrams_do_not_disturb_the_cluster(cluster: AttackedCluster) -> None:
    """Noise, and adverts with the cluster's tag: the addresses in them are dialled, within limits."""
    tag = namespace_tag(cluster.trust_log().secret)
    lies = {"agents": cluster.addresses, "own": cluster.stranger.address, "port": DISCOVERY_PORT, "tag": tag}
    # What mDNS remembers is bounded: 10,000 records, which 2,500 adverts fill.
    with cluster.undisturbed(descriptors=512, growth=2 * MAX_GROWTH):
        assert cluster.attack("datagrams", each=2600, **lies)["sent"] > 10_000
    with cluster.undisturbed(descriptors=512, growth=MAX_GROWTH):
        cluster.attack("datagrams", each=1000, **lies)


# guests that exceed their role


class Guests(NamedTuple):
    """Keys of two guests, and of an owner in the log that was never online."""

    keeps: tuple[str, str]
    away: str


@pytest.fixture(scope="module")
def guests(cluster: AttackedCluster) -> Guests:
    keeps = (cluster.new_path(), cluster.new_path())
    away = cluster.join(cluster.pairing_code(), name="away")
    assert away["joined"]
    for keep in keeps:
        joined = cluster.join(cluster.pairing_code("guest"), cluster.stranger, keep=keep, name="guest")
        assert joined.get("role") == "guest"
    return Guests(keeps, away["node"])


@restore_after_failure
def test_guest_proposals_and_votes_are_ignored(cluster: AttackedCluster, guests: Guests) -> None:
    with cluster.undisturbed(views=2):
        cluster.attack(
            "guest_decides", keep=guests.keeps[0], agents=cluster.agents, friend="ab" * 32, times=10
        )


def _while_guests_lie(
    cluster: AttackedCluster, guests: Guests, lie: str, *, views: int, decides: bool = False
) -> None:
    cue = Path(cluster.new_path())
    with cluster.undisturbed(views=views, decisions=int(decides)):
        lying = cluster.start(
            cluster.stranger,
            "guests_lie",
            keeps=guests.keeps,
            agents=cluster.agents,
            away=guests.away,
            lie=lie,
            cue=str(cue),
        ).await_ready()
        try:
            time.sleep(2.0)
            joined = cluster.join(cluster.pairing_code()) if decides else {"joined": True}
            in_time = lying.result() is None
        finally:
            cue.touch()
        cluster.await_result(lying)
        assert joined["joined"]
        assert in_time, "the cluster decided only when the guests had left"


@restore_after_failure
def test_guests_that_report_one_death_are_ignored(cluster: AttackedCluster, guests: Guests) -> None:
    _while_guests_lie(cluster, guests, "one is dead", views=4)


@restore_after_failure
def test_guests_that_report_all_dead_are_ignored(cluster: AttackedCluster, guests: Guests) -> None:
    _while_guests_lie(cluster, guests, "all are dead", views=4, decides=True)


@restore_after_failure
def test_guests_that_report_arrivals_are_ignored(cluster: AttackedCluster, guests: Guests) -> None:
    _while_guests_lie(cluster, guests, "visitors", views=4)
    assert not any("away" in members(line) for line in cluster.log_lines(0))


@restore_after_failure
def test_guests_with_names_of_others_are_ignored(cluster: AttackedCluster, guests: Guests) -> None:
    _while_guests_lie(cluster, guests, "another name", views=4, decides=True)


@restore_after_failure
def test_guests_with_changing_identity_are_ignored(cluster: AttackedCluster, guests: Guests) -> None:
    # A view for each change of both guests, and for their joining and leaving.
    _while_guests_lie(cluster, guests, "another self", views=2 * SELVES + 4)


@restore_after_failure
def test_guests_with_another_history_are_ignored(cluster: AttackedCluster, guests: Guests) -> None:
    _while_guests_lie(cluster, guests, "another history", views=6)


@restore_after_failure
def test_guests_with_another_time_are_ignored(cluster: AttackedCluster, guests: Guests) -> None:
    _while_guests_lie(cluster, guests, "another time", views=6)


@restore_after_failure
def test_guest_with_invalid_messages_is_disconnected(cluster: AttackedCluster, guests: Guests) -> None:
    with cluster.undisturbed():
        result = cluster.attack("guest_babbles", keep=guests.keeps[0], agents=cluster.agents, times=2)
        assert result["left_open"] == 0


@restore_after_failure
def test_guest_connections_are_limited(cluster: AttackedCluster, guests: Guests) -> None:
    with cluster.undisturbed(views=4):
        cluster.attack("guest_links", keep=guests.keeps[0], agents=cluster.agents, links=40)


@restore_after_failure
def test_guest_reports_own_links_only(cluster: AttackedCluster, guests: Guests) -> None:
    with cluster.undisturbed(views=4):
        cluster.attack("guest_measures", keep=guests.keeps[0], agents=cluster.agents, crumbs=110_000)
    assert all(link.mbps != 0.1 for link in cluster.measure(0).status.links)


@restore_after_failure
def test_guest_name_changes_are_limited(cluster: AttackedCluster, guests: Guests) -> None:
    with cluster.undisturbed(views=4):
        cluster.attack("guest_greets", keep=guests.keeps[0], agents=cluster.agents, names=100)
