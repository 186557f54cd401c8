"""Attacks by a machine that was removed from the cluster and kept its keys and old messages."""

from __future__ import annotations

import contextlib
import os
import sqlite3

from barnraise.agent_client.cluster_requests import RequestDone, UnpairRequest
from barnraise.identity import NodeId
from benchmarks.attacks.registry import attack
from benchmarks.attacks.scenes.cluster import OWNERS, AttackedCluster

_SLEEPER = 2


@attack(
    "removed-dials",
    "removed machine",
    "dials with its key, the old discovery secret and the leaked new one",
    AttackedCluster,
)
def dial_after_removal(cluster: AttackedCluster) -> str:
    keep = cluster.new_path()
    with cluster.unchanged(decisions=1):
        assert cluster.join(cluster.pairing_code(), cluster.stranger, keep=keep, name="thief")["joined"]
    known = {"agents": cluster.endpoints, "trusted": cluster.nodes, "keep": keep, "times": 5}
    old = cluster.trust_log().secret.hex()
    entered = cluster.attack("come_as_member", secrets=[old], **known)["entered"]
    assert entered == 15, "it did not get in while it was a member, so nothing was tried"
    with cluster.unchanged(decisions=1, views=2):
        cluster.machines.ask(1, UnpairRequest("thief"), RequestDone)
    new = cluster.trust_log().secret.hex()
    assert new != old, "the discovery secret is still the old one"
    with cluster.unchanged():
        result = cluster.attack("come_as_member", secrets=[old, new], **known)
        assert result["entered"] == 0, "it got in"
        assert any("does not trust" in words for words in result["words"]), "the new secret fails at TLS"
        assert any("without an answer" in words for words in result["words"]), (
            "the old secret fails at the preface"
        )
    return "no answer with the old secret, rejected by TLS with the new"


@attack(
    "removed-meets-sleeper",
    "removed machine",
    "forges branches, decisions, a log and an order at a machine that slept during the removal",
    AttackedCluster,
)
def meet_sleeper(cluster: AttackedCluster) -> str:
    keep, canary = cluster.new_path(), cluster.new_path()
    machines = cluster.machines
    joined = cluster.join(cluster.pairing_code(), cluster.stranger, keep=keep, name="thief")
    assert joined["joined"], joined
    thief = NodeId(bytes.fromhex(joined["node"]))
    machines.until(lambda: len(cluster.trust_log(_SLEEPER)) == len(cluster.trust_log()), 60.0, "h2 knows it")
    machines.kill(_SLEEPER)
    machines.ask(1, UnpairRequest("thief"), RequestDone)
    assert thief not in cluster.trust_log().members, "the thief was not removed, so nothing was tried"
    with cluster.cut_off(_SLEEPER):
        machines.start(_SLEEPER)
        assert thief in cluster.trust_log(_SLEEPER).members, "the sleeper knew of the removal"
        length = len(cluster.trust_log(_SLEEPER))
        agents = [cluster.agents[_SLEEPER]]
        running = cluster.start(cluster.stranger, "return_as_owner", keep=keep, agents=agents, canary=canary)
        result = cluster.await_result(running)
        assert result["reached"] == 1, "it did not reach the sleeper, so nothing was tried"
        assert len(cluster.trust_log(_SLEEPER)) == length, "the sleeper took another trust log"
        _check_no_order(cluster, canary)
    machines.until(lambda: machines.agree(OWNERS), 90.0, "the sleeper follows the others")
    second = NodeId(bytes.fromhex(result["second"]))
    for place in OWNERS:
        log = cluster.trust_log(place)
        assert log.role(thief) is None, "the removed machine is an owner again"
        assert log.role(second) is None, "its second machine is an owner"
    _check_no_order(cluster, canary)
    return "no vote, no other log, no run; the sleeper follows the others"


def _check_no_order(cluster: AttackedCluster, canary: str) -> None:
    assert not os.path.exists(canary), "its code ran"
    for place in OWNERS:
        path = cluster.machines.state(place) / "cluster.db"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as base:
            names = [row[0] for row in base.execute("SELECT name FROM run")]
        assert "mallory" not in names, "its order was taken"
