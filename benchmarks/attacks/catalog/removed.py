"""Attacks by a machine that was removed from the cluster and kept its keys and old messages."""

from __future__ import annotations

from barnraise.agent_client.cluster_requests import RequestDone, UnpairRequest
from benchmarks.attacks.registry import attack
from benchmarks.attacks.scenes.cluster import AttackedCluster


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
