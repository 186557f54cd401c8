"""Attacks by guests on the cluster's agreement: their keys are valid, their messages are not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from benchmarks.attacks.registry import attack, undisturbed
from benchmarks.attacks.scenes.cluster import PORT, AttackedCluster, members
from benchmarks.attacks.tools.guest import SELVES

_GUEST: Final = "guest"


@attack("guest-decides", _GUEST, "proposes, votes, announces, admits and removes", AttackedCluster)
def decide(cluster: AttackedCluster) -> str:
    keep = cluster.guests.keeps[0]
    with cluster.unchanged(views=2):
        cluster.attack("guest_decides", keep=keep, agents=cluster.agents, friend="ab" * 32, times=10)
    return "ignored: the trust log and the view are as before"


def _lie(cluster: AttackedCluster, lie: str, *, views: int, decides: bool = False) -> None:
    """Send one kind of false heartbeat from two guests; with ``decides`` a machine joins meanwhile."""
    guests, cue = cluster.guests, Path(cluster.new_path())
    with cluster.unchanged(views=views, decisions=int(decides)):
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
        undisturbed(joined["joined"], "a machine could not join meanwhile")
        undisturbed(in_time, "the cluster decided only when the guests had left")


@attack("guest-one-is-dead", _GUEST, "reports an owner as dead", AttackedCluster)
def report_one_dead(cluster: AttackedCluster) -> str:
    _lie(cluster, "one is dead", views=4)
    return "no owner left the view"


@attack("guest-all-are-dead", _GUEST, "reports all owners as dead", AttackedCluster)
def report_all_dead(cluster: AttackedCluster) -> str:
    _lie(cluster, "all are dead", views=4, decides=True)
    return "no owner left the view, and a machine joined"


@attack("guest-brings-visitors", _GUEST, "reports absent and unknown machines as present", AttackedCluster)
def report_arrivals(cluster: AttackedCluster) -> str:
    _lie(cluster, "visitors", views=4)
    assert not any("away" in members(line) for line in cluster.log_lines(0)), "an absent machine entered"
    return "no such machine entered the view"


@attack("guest-other-name", _GUEST, "sends heartbeats in the names of others", AttackedCluster)
def use_other_name(cluster: AttackedCluster) -> str:
    _lie(cluster, "another name", views=4, decides=True)
    return "ignored, and a machine joined"


@attack("guest-other-self", _GUEST, "changes what it is again and again", AttackedCluster)
def change_identity(cluster: AttackedCluster) -> str:
    # A view for each change of both guests, and for their joining and leaving.
    _lie(cluster, "another self", views=2 * SELVES + 4)
    return "each change is one view at most"


@attack("guest-other-history", _GUEST, "tells another history of decisions", AttackedCluster)
def tell_other_history(cluster: AttackedCluster) -> str:
    _lie(cluster, "another history", views=6)
    return "log and branch are as before"


@attack("guest-other-time", _GUEST, "sends impossible times", AttackedCluster)
def tell_other_time(cluster: AttackedCluster) -> str:
    _lie(cluster, "another time", views=6)
    return "ignored"


@attack("guest-babbles", _GUEST, "sends unknown kinds, deep nests and impossible frames", AttackedCluster)
def babble(cluster: AttackedCluster) -> str:
    keep = cluster.guests.keeps[0]
    with cluster.unchanged():
        result = cluster.attack("guest_babbles", keep=keep, agents=cluster.agents, times=2)
        assert result["left_open"] == 0, "a link stayed open"
    return "each message cut its link"


@attack("guest-opens-links", _GUEST, "opens links without end", AttackedCluster)
def open_links(cluster: AttackedCluster) -> str:
    keep = cluster.guests.keeps[0]
    with cluster.unchanged(views=4):
        cluster.attack("guest_links", keep=keep, agents=cluster.agents, links=40)
    return "the agents' descriptors stayed bounded"


@attack("guest-measures", _GUEST, "measures in crumbs and reports others' links", AttackedCluster)
def measure_falsely(cluster: AttackedCluster) -> str:
    keep = cluster.guests.keeps[0]
    with cluster.unchanged(views=4):
        cluster.attack("guest_measures", keep=keep, agents=cluster.agents, crumbs=110_000)
    assert all(link.mbps != 0.1 for link in cluster.measure(0).status.links), "a false figure is shown"
    return "its figures about others' links are not shown"


@attack("guest-greets", _GUEST, "greets with ever new names and terminal commands", AttackedCluster)
def greet_with_new_names(cluster: AttackedCluster) -> str:
    keep = cluster.guests.keeps[0]
    with cluster.unchanged(views=4):
        cluster.attack("guest_greets", keep=keep, agents=cluster.agents, names=100)
    return "few lines in the log, and no escape sequence"


@attack("guest-scans-ports", _GUEST, "lets an owner's agent dial ports of another machine", AttackedCluster)
def scan_ports(cluster: AttackedCluster) -> str:
    keep, victim = cluster.guests.keeps[0], cluster.addresses[1]
    with cluster.unchanged(views=4):
        answers = cluster.attack(
            "guest_scans", keep=keep, agents=cluster.agents, victim=victim, ports=[PORT, 9, 4000]
        )["told"]
    assert answers, "the agent did not answer"
    assert all(address != victim for address, _, _ in answers), "the agent dialled another machine"
    assert {outcome for _, outcome, _ in answers} == {"unreached"}, "open and closed ports differ"
    return "it dials the guest's own address only, and every port looks alike"
