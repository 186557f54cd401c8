"""Attacks by a machine that was removed from the cluster and kept its keys and old messages."""

from __future__ import annotations

from pathlib import Path

from barnraise.agent_client.cluster_requests import RequestDone, UnpairRequest
from barnraise.identity import NodeId
from benchmarks.attacks.registry import attack
from benchmarks.attacks.scenes.cluster import OWNERS, AttackedCluster


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
    "removed-returns-through-sleeper",
    "removed machine",
    "reaches a machine that slept first: forges history, admits a second machine, orders a run",
    AttackedCluster,
)
def return_through_sleeper(cluster: AttackedCluster) -> str:
    keep, canary, sleeper = cluster.new_path(), cluster.new_path(), 2
    with cluster.unchanged(decisions=1):
        joined = cluster.join(cluster.pairing_code(), cluster.stranger, keep=keep, name="returner")
        assert joined["joined"], joined
    machines, hosts = cluster.machines, cluster.machines.hosts
    machines.freeze(sleeper)
    try:
        machines.until(lambda: machines.agree((0, 1)), 90.0, "the others continue without the sleeper")
        machines.ask(0, UnpairRequest("returner"), RequestDone)
        for place in (0, 1):
            cluster.lab.cut(hosts[place], hosts[sleeper])
        machines.thaw(sleeper)
        agents = [cluster.agents[sleeper]]
        result = cluster.attack("removed_returns", keep=keep, agents=agents, canary=canary, seconds=6.0)
        assert result["sent"], f"the sleeper did not hear it, so nothing was tried: {result}"
        assert not Path(canary).exists(), "the sleeper ran its code"
    finally:
        machines.thaw(sleeper)
        cluster.lab.heal_all()
    machines.until(lambda: machines.agree(OWNERS), 90.0, "the owners agree again")
    for place in OWNERS:
        log = cluster.trust_log(place)
        for raw in (joined["node"], result["second"]):
            assert log.role(NodeId(bytes.fromhex(raw))) is None, f"h{place} counts it as a member"
    assert not Path(canary).exists(), "a machine ran its code"
    return f"{result['sent']} forged messages: no role anywhere, and nothing ran"
