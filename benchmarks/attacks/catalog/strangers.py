"""Attacks by people on the LAN without a key: on pairing, discovery, TLS and the listener."""

from __future__ import annotations

from typing import Final

from barnraise.discovery import namespace_tag
from benchmarks.attacks.registry import attack
from benchmarks.attacks.scenes.cluster import MAX_GROWTH, OWNERS, AttackedCluster

_LAN: Final = "person on the LAN"
_DISCOVERY_PORT = 52415
_MAX_WAITING = 128 + 64  # connections without a preface, and handshakes


# pairing


@attack("lan-guess-code", _LAN, "guesses a pairing code, then types the right one", AttackedCluster)
def guess_code(cluster: AttackedCluster) -> str:
    with cluster.unchanged():
        code = cluster.pairing_code()
        number, first, *rest = code.split("-")
        other = "acrobat" if first != "acrobat" else "zebra"
        wrong = "-".join((number, other, *rest))
        assert not cluster.join(wrong, cluster.stranger)["joined"]
        cluster.await_burned_code()
        assert not cluster.join(code, cluster.stranger)["joined"], "the right code, too late"
    return "the first guess burned the code"


@attack(
    "lan-replay-pairing", _LAN, "replays a recorded pairing, also behind a fresh preface", AttackedCluster
)
def replay_pairing(cluster: AttackedCluster) -> str:
    record = cluster.new_path()
    with cluster.unchanged(decisions=1):
        code = cluster.pairing_code()
        port = cluster.new_port()
        relay = cluster.start(
            cluster.stranger, "relay", listen=port, record=record, **cluster.target
        ).await_ready()
        joined = cluster.join(code, host=cluster.stranger.address, port=port)
        assert joined["joined"], "a relay that changes nothing does no harm"
        cluster.await_result(relay)
    with cluster.unchanged():
        number = int(cluster.pairing_code().split("-")[0])
        heard = cluster.attack("replay", record=record, number=number, **cluster.target)
        assert heard["as_it_was"] == 0, "the replay got an answer"
        cluster.await_burned_code()
    return "no answer, and behind a fresh preface one burned guess"


def _pair_with_changed_byte(cluster: AttackedCluster, way: str, at: int) -> str:
    with cluster.unchanged():
        code = cluster.pairing_code()
        port = cluster.new_port()
        relay = cluster.start(
            cluster.stranger, "relay", listen=port, way=way, at=at, **cluster.target
        ).await_ready()
        assert not cluster.join(code, host=cluster.stranger.address, port=port)["joined"]
        assert cluster.await_result(relay)[way] > at, "the byte was not changed"
        # An invalid half of an exchange is not a guess, so the code may stay open.
        cluster.machines.until(
            lambda: cluster.offer_state() in ("burned", "open"), 30.0, "the exchange is over"
        )
    return "both sides gave up"


@attack("lan-change-joiner-half", _LAN, "changes a byte of the joiner's half of a pairing", AttackedCluster)
def change_joiner_half(cluster: AttackedCluster) -> str:
    return _pair_with_changed_byte(cluster, "up", 120)


@attack("lan-change-offerer-half", _LAN, "changes a byte of the offerer's half", AttackedCluster)
def change_offerer_half(cluster: AttackedCluster) -> str:
    return _pair_with_changed_byte(cluster, "down", 50)


@attack("lan-change-proof", _LAN, "changes a byte of the joiner's sealed proof", AttackedCluster)
def change_proof(cluster: AttackedCluster) -> str:
    return _pair_with_changed_byte(cluster, "up", 250)


# discovery and TLS


@attack("lan-steal-advert", _LAN, "advertises the cluster's tag and answers its callers", AttackedCluster)
def steal_advert(cluster: AttackedCluster) -> str:
    # The attacker shows the callers' prefaces to the other agents, too.
    with cluster.unchanged():
        tag, port = namespace_tag(cluster.trust_log().secret), cluster.new_port()
        stolen = cluster.attack("steal_advert", tag=tag, listen=port, agents=cluster.endpoints, seconds=2.0)
    assert stolen["callers"] >= 1, "no agent called, so nothing was tried"
    assert stolen["certificates"] == 0, "a caller showed its certificate"
    assert stolen["replayed"] >= 3, "no preface was replayed"
    assert stolen["certificates_of_agents"] == stolen["answered"] == 0, "a replayed preface was answered"
    return "it saw prefaces only, and they open nothing elsewhere"


@attack("lan-own-key", _LAN, "dials with a key of its own and the stolen discovery secret", AttackedCluster)
def dial_with_own_key(cluster: AttackedCluster) -> str:
    known = {"agents": cluster.endpoints, "trusted": cluster.nodes, "times": 10}
    secret = cluster.trust_log().secret.hex()
    with cluster.unchanged():
        assert cluster.attack("come_as_member", secrets=[secret], **known)["entered"] == 0
        assert cluster.attack("come_as_member", secrets=["00" * 32], **known)["entered"] == 0
    for place in OWNERS:
        named = cluster.await_log_lines(place, f"connection from {cluster.stranger.address}")
        assert 1 <= len(named) <= 5, "one line for each kind of failure"
    return "TLS rejected it, and the log names its address"


@attack("lan-forged-name", _LAN, "shows a certificate in a member's name", AttackedCluster)
def forge_name(cluster: AttackedCluster) -> str:
    known = {"agents": cluster.endpoints, "trusted": cluster.nodes, "times": 10}
    secret = cluster.trust_log().secret.hex()
    with cluster.unchanged():
        forged = cluster.attack("come_as_member", secrets=[secret], claims=cluster.nodes[1], **known)
        assert forged["entered"] == 0
    return "TLS rejected it"


# floods, large and slow input


@attack("lan-garbage", _LAN, "sends garbage, other protocols and forged MACs", AttackedCluster)
def send_garbage(cluster: AttackedCluster) -> str:
    with cluster.unchanged(descriptors=_MAX_WAITING):
        result = cluster.attack(
            "garbage", agents=cluster.endpoints, secret=cluster.trust_log().secret.hex(), times=6
        )
        assert result["answered_without_preface"] == 0
    for place in OWNERS:
        named = cluster.await_log_lines(place, f"rejected {cluster.stranger.address}")
        assert 1 <= len(named) <= 3, "one line for each kind of rejection"
    return "no byte in answer"


@attack("lan-silent-flood", _LAN, "opens 2,500 connections and stays silent", AttackedCluster)
def flood_silently(cluster: AttackedCluster) -> str:
    with cluster.unchanged(decisions=1, descriptors=_MAX_WAITING):
        code = cluster.pairing_code()
        many = {"silent": 2000, "half": 500, "max_open": _MAX_WAITING}
        flood = cluster.start(cluster.stranger, "flood", seconds=6.0, **many, **cluster.target)
        flood.await_ready()
        assert cluster.join(code)["joined"], "it kept an honest machine from joining"
        result = cluster.await_result(flood)
        assert result["opened"] >= 2400, "the flood was too small to show anything"
        assert result["open_still"] <= _MAX_WAITING
    return f"at most {_MAX_WAITING} stayed open, and a machine with a code joined"


@attack("lan-pairing-crowd", _LAN, "keeps 200 pairing requests open", AttackedCluster)
def crowd_pairing(cluster: AttackedCluster) -> str:
    with cluster.unchanged(decisions=1, descriptors=_MAX_WAITING):
        code = cluster.pairing_code()
        number = int(code.split("-")[0])
        crowd = cluster.start(
            cluster.stranger, "crowd", number=number, people=200, seconds=4.0, **cluster.target
        )
        crowd.await_ready()
        joined = cluster.join(code)
        cluster.await_result(crowd)
        assert joined["joined"], joined["words"]
    return "a machine with the code joined meanwhile"


@attack("lan-fill-log", _LAN, "opens and closes 100 pairing requests", AttackedCluster)
def fill_log(cluster: AttackedCluster) -> str:
    with cluster.unchanged(descriptors=_MAX_WAITING):
        number = int(cluster.pairing_code().split("-")[0])
        cluster.attack("hasty", number=number, times=100, **cluster.target)
    return "the log has at most 20 lines about it"


@attack("lan-slow-sender", _LAN, "sends one byte a second in preface, TLS and pairing", AttackedCluster)
def send_slowly(cluster: AttackedCluster) -> str:
    with cluster.unchanged(descriptors=_MAX_WAITING):
        number, secret = int(cluster.pairing_code().split("-")[0]), cluster.trust_log().secret.hex()
        borne = cluster.attack("drip", number=number, secret=secret, **cluster.target)
        assert max(borne.values()) < 15.0, borne  # the attack itself lasts 20 s
    return f"it was disconnected after {max(borne.values()):.0f} s at most"


@attack("lan-false-adverts", _LAN, "sends noise and false adverts by the thousand", AttackedCluster)
def send_false_adverts(cluster: AttackedCluster) -> str:
    tag = namespace_tag(cluster.trust_log().secret)
    lies = {
        "agents": cluster.addresses,
        "own": cluster.stranger.address,
        "port": _DISCOVERY_PORT,
        "tag": tag,
    }
    # What mDNS remembers is bounded: 10,000 records, which 2,500 adverts fill.
    with cluster.unchanged(descriptors=512, growth=2 * MAX_GROWTH):
        assert cluster.attack("datagrams", each=2600, **lies)["sent"] > 10_000
    with cluster.unchanged(descriptors=512, growth=MAX_GROWTH):
        cluster.attack("datagrams", each=1000, **lies)
    return "ignored; the addresses in them are dialled within limits"
