"""Attacks by a removed machine on a machine that slept during the removal."""

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
