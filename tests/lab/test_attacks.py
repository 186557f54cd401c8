"""A cluster at work, and an attacker in its network: everything is rejected, and no machine is disturbed."""

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
from tests.lab.besieged import (
    MOST_GROWTH,
    OWNERS,
    RETURNS_WHAT_IS_FREED,
    House,
    members,
    settles_after_a_failure,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

DISCOVERY_PORT = 52415
MOST_WAITING = 128 + 64  # connections without a preface, and handshakes


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with Lab(hosts=5) as lab, Machines(lab.hosts[:3]) as machines:
        machines.extra |= RETURNS_WHAT_IS_FREED
        machines.form()
        yield House(lab, machines)


# pairing


@settles_after_a_failure
def test_pairing_code_allows_one_guess(house: House) -> None:
    with house.undisturbed():
        code = house.code()
        number, first, second = code.split("-")
        wrong = f"{number}-{second}-{first}" if first != second else f"{number}-acrobat-zebra"
        assert not house.join(wrong, house.stranger)["joined"]
        house.until_burned()
        assert not house.join(code, house.stranger)["joined"], "the right code, too late"


@settles_after_a_failure
def test_replayed_pairing_opens_nothing(house: House) -> None:
    record = house.new_path()
    with house.undisturbed(decisions=1):
        code = house.code()
        port = house.new_port()
        relay = house.start(house.stranger, "relay", listen=port, record=record, **house.door).await_ready()
        assert house.join(code, host=house.stranger.address, port=port)["joined"], (
            "a relay alone does no harm"
        )
        house.end(relay)
    with house.undisturbed():
        number = int(house.code().split("-")[0])
        heard = house.attack("replay", record=record, number=number, **house.door)
        assert heard["as_it_was"] == 0, "not a word in answer"
        house.until_burned()


@pytest.mark.parametrize(("way", "at"), [("up", 120), ("down", 50), ("up", 250)])
@settles_after_a_failure
def test_pairing_with_changed_byte_fails(house: House, way: str, at: int) -> None:
    """In the joiner's half of the exchange, in the offerer's half, and in the joiner's sealed proof."""
    with house.undisturbed():
        code = house.code()
        port = house.new_port()
        relay = house.start(house.stranger, "relay", listen=port, way=way, at=at, **house.door).await_ready()
        assert not house.join(code, host=house.stranger.address, port=port)["joined"]
        assert house.end(relay)[way] > at
        # What is no half of an exchange is no guess either.
        house.machines.until(lambda: house.offer() in ("burned", "open"), 30.0, "the exchange is over")


# discovery and TLS


@pytest.fixture(scope="module")
@settles_after_a_failure
def stolen(house: House) -> dict[str, Any]:
    """Advertise the cluster's tag as an attacker, answer the callers, and show their preface to others."""
    with house.undisturbed():
        tag, port = namespace_tag(house.log().secret), house.new_port()
        return house.attack("steal_advert", tag=tag, listen=port, agents=house.doors, seconds=2.0)


def test_copied_advert_gets_preface_only(stolen: dict[str, Any]) -> None:
    assert stolen["callers"] >= 1
    assert stolen["certificates"] == 0


def test_replayed_preface_is_rejected(stolen: dict[str, Any]) -> None:
    assert stolen["replayed"] >= 3
    assert stolen["certificates_of_agents"] == 0
    assert stolen["answered"] == 0


@settles_after_a_failure
def test_unknown_key_is_not_a_member(house: House) -> None:
    """The stranger knows the discovery secret, and once also in whose name to come."""
    known = {"agents": house.doors, "trusted": house.nodes, "times": 10}
    secret = house.log().secret.hex()
    with house.undisturbed():
        assert house.attack("come_as_member", secrets=[secret], **known)["entered"] == 0
        forged = house.attack("come_as_member", secrets=[secret], claims=house.nodes[1], **known)
        assert forged["entered"] == 0
        assert house.attack("come_as_member", secrets=["00" * 32], **known)["entered"] == 0


@settles_after_a_failure
def test_tls_failure_names_its_source(house: House) -> None:
    secret = house.log().secret.hex()
    house.attack("come_as_member", secrets=[secret], agents=house.doors, trusted=house.nodes)
    for place in OWNERS:
        named = house.until_named(place, f"connection from {house.stranger.address}")
        assert 1 <= len(named) <= 5, "once for each way to fail"


@settles_after_a_failure
def test_removed_member_is_rejected(house: House) -> None:
    keep = house.new_path()
    with house.undisturbed(decisions=1):
        assert house.join(house.code(), house.stranger, keep=keep, name="thief")["joined"]
    known = {"agents": house.doors, "trusted": house.nodes, "keep": keep, "times": 5}
    old = house.log().secret.hex()
    assert house.attack("come_as_member", secrets=[old], **known)["entered"] == 15, "as long as it is one"
    with house.undisturbed(decisions=1, views=2):
        house.machines.ask(1, UnpairRequest("thief"), RequestDone)
    new = house.log().secret.hex()
    assert new != old
    with house.undisturbed():
        found = house.attack("come_as_member", secrets=[old, new], **known)
        assert found["entered"] == 0
        assert any("does not trust" in words for words in found["words"]), "the leaked one ends at TLS"
        assert any("without an answer" in words for words in found["words"]), "the old one at the door"


# too much, too large, too slow


@settles_after_a_failure
def test_garbage_gets_no_answer(house: House) -> None:
    with house.undisturbed(descriptors=MOST_WAITING):
        found = house.attack("garbage", agents=house.doors, secret=house.log().secret.hex(), times=6)
        assert found["answered_at_the_door"] == 0
    for place in OWNERS:
        named = house.until_named(place, f"rejected {house.stranger.address}")
        assert 1 <= len(named) <= 3, "once for each place that turns somebody away"


@settles_after_a_failure
def test_silent_connections_do_not_block_others(house: House) -> None:
    with house.undisturbed(decisions=1, descriptors=MOST_WAITING):
        code = house.code()
        many = {"silent": 2000, "half": 500, "most": MOST_WAITING}
        flood = house.start(house.stranger, "flood", seconds=6.0, **many, **house.door)
        flood.await_ready()
        assert house.join(code)["joined"]
        found = house.end(flood)
        assert found["opened"] >= 2400
        assert found["open_still"] <= MOST_WAITING


@settles_after_a_failure
def test_many_pairing_attempts_do_not_block_others(house: House) -> None:
    with house.undisturbed(decisions=1, descriptors=MOST_WAITING):
        code = house.code()
        number = int(code.split("-")[0])
        crowd = house.start(house.stranger, "crowd", number=number, people=200, seconds=4.0, **house.door)
        crowd.await_ready()
        joined = house.join(code)
        house.end(crowd)
        assert joined["joined"], joined["words"]


@settles_after_a_failure
def test_visits_to_the_pairing_desk_fill_no_log(house: House) -> None:
    with house.undisturbed(descriptors=MOST_WAITING):
        number = int(house.code().split("-")[0])
        house.attack("hasty", number=number, times=100, **house.door)


@settles_after_a_failure
def test_one_byte_a_second_is_not_borne_for_long(house: House) -> None:
    with house.undisturbed(descriptors=MOST_WAITING):
        number, secret = int(house.code().split("-")[0]), house.log().secret.hex()
        borne = house.attack("drip", number=number, secret=secret, **house.door)
        assert max(borne.values()) < 15.0, borne  # whoever bears all of it bears it for 20 s


@settles_after_a_failure
def test_datagrams_of_all_kinds(house: House) -> None:
    """Noise, and adverts with the cluster's tag: the addresses in them are dialled, within limits."""
    tag = namespace_tag(house.log().secret)
    lies = {"agents": house.addresses, "own": house.stranger.address, "port": DISCOVERY_PORT, "tag": tag}
    # What mDNS remembers is bounded: 10,000 records, which 2,500 adverts fill.
    with house.undisturbed(descriptors=512, growth=2 * MOST_GROWTH):
        assert house.attack("datagrams", each=2600, **lies)["sent"] > 10_000
    with house.undisturbed(descriptors=512, growth=MOST_GROWTH):
        house.attack("datagrams", each=1000, **lies)


# guests who want more


class Guests(NamedTuple):
    """Keys of two guests, and of an owner in the log that was never online."""

    keeps: tuple[str, str]
    away: str


@pytest.fixture(scope="module")
def guests(house: House) -> Guests:
    keeps = (house.new_path(), house.new_path())
    away = house.join(house.code(), name="away")
    assert away["joined"]
    for keep in keeps:
        joined = house.join(house.code("guest"), house.stranger, keep=keep, name="guest")
        assert joined.get("role") == "guest"
    return Guests(keeps, away["node"])


@settles_after_a_failure
def test_guest_proposals_and_votes_are_ignored(house: House, guests: Guests) -> None:
    with house.undisturbed(views=2):
        house.attack("guest_decides", keep=guests.keeps[0], agents=house.agents, friend="ab" * 32, times=10)


def _while_guests_lie(house: House, guests: Guests, lie: str, *, views: int, decides: bool = False) -> None:
    cue = Path(house.new_path())
    with house.undisturbed(views=views, decisions=int(decides)):
        lying = house.start(
            house.stranger,
            "guests_lie",
            keeps=guests.keeps,
            agents=house.agents,
            away=guests.away,
            lie=lie,
            cue=str(cue),
        ).await_ready()
        try:
            time.sleep(2.0)
            joined = house.join(house.code()) if decides else {"joined": True}
            in_time = lying.result() is None
        finally:
            cue.touch()
        house.end(lying)
        assert joined["joined"]
        assert in_time, "the cluster decided only when the guests had left"


@settles_after_a_failure
def test_guests_that_report_one_death_are_ignored(house: House, guests: Guests) -> None:
    _while_guests_lie(house, guests, "one is dead", views=4)


@settles_after_a_failure
def test_guests_that_report_all_dead_are_ignored(house: House, guests: Guests) -> None:
    _while_guests_lie(house, guests, "all are dead", views=4, decides=True)


@settles_after_a_failure
def test_guests_that_report_arrivals_are_ignored(house: House, guests: Guests) -> None:
    _while_guests_lie(house, guests, "visitors", views=4)
    assert not any("away" in members(line) for line in house.words(0))


@settles_after_a_failure
def test_guests_under_others_names(house: House, guests: Guests) -> None:
    _while_guests_lie(house, guests, "another name", views=4, decides=True)


@settles_after_a_failure
def test_guests_with_changing_identity_are_ignored(house: House, guests: Guests) -> None:
    # As often as both change, however long we take: those, their first coming and their leaving.
    _while_guests_lie(house, guests, "another self", views=2 * SELVES + 4)


@settles_after_a_failure
def test_guests_with_another_history(house: House, guests: Guests) -> None:
    _while_guests_lie(house, guests, "another history", views=6)


@settles_after_a_failure
def test_guests_with_another_time(house: House, guests: Guests) -> None:
    _while_guests_lie(house, guests, "another time", views=6)


@settles_after_a_failure
def test_guest_with_invalid_messages_is_disconnected(house: House, guests: Guests) -> None:
    with house.undisturbed():
        found = house.attack("guest_babbles", keep=guests.keeps[0], agents=house.agents, times=2)
        assert found["left_open"] == 0


@settles_after_a_failure
def test_guest_connections_are_limited(house: House, guests: Guests) -> None:
    with house.undisturbed(views=4):
        house.attack("guest_links", keep=guests.keeps[0], agents=house.agents, links=40)


@settles_after_a_failure
def test_guest_reports_own_links_only(house: House, guests: Guests) -> None:
    with house.undisturbed(views=4):
        house.attack("guest_measures", keep=guests.keeps[0], agents=house.agents, crumbs=110_000)
    assert all(link.mbps != 0.1 for link in house.read(0).told.links)


@settles_after_a_failure
def test_guest_name_changes_are_limited(house: House, guests: Guests) -> None:
    with house.undisturbed(views=4):
        house.attack("guest_greets", keep=guests.keeps[0], agents=house.agents, names=100)
