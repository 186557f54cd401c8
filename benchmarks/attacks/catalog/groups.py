"""Attacks of guests on groups that `barnraise run` did not start: torchrun, `MASTER_ADDR`, a notebook."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.agents.runs import write_folder
from benchmarks.attacks.registry import attack
from benchmarks.attacks.scenes.runs import GUEST, RunCluster

_GROUP_S = 120.0
_GROUP = """\
import os
from datetime import timedelta
import torch.distributed as dist

class Bomb:
    def __reduce__(self):
        return open, (os.environ["CANARY"], "w")

rank = int(os.environ["RANK"])
received = [None, None]
try:
    dist.init_process_group("barnraise", timeout=timedelta(seconds=20))
    dist.all_gather_object(received, Bomb() if "HOSTILE" in os.environ and rank else f"word {rank}")
    print("READ", received, flush=True)
except Exception as error:
    print("REFUSED", error, flush=True)
"""
# The guest's own communication process would refuse owners, too. This one trusts all.
_HOSTILE = """\
import os
if "HOSTILE" in os.environ:
    from barnraise.collectives.comm_process.links.handshakes import HandshakeSecurity
    from barnraise.identity import NodeId
    honest = HandshakeSecurity.of.__func__
    every = [NodeId(bytes.fromhex(node)) for node in os.environ["HOSTILE"].split(",")]
    HandshakeSecurity.of = classmethod(
        lambda cls, credentials, trusted, secret, **more: honest(cls, credentials, every, secret, **more)
    )
"""


def _form_group(
    cluster: RunCluster, folder: Path, place: int, *, run: str = "default", **more: str
) -> list[str]:
    """Start a group of the first owner and another machine by hand, and return what both printed."""
    port = str(cluster.new_port())
    processes = []
    for rank, host in enumerate((0, place)):
        environment = cluster.machines.environment(host) | {
            "MASTER_ADDR": cluster.addresses[0],
            "MASTER_PORT": port,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "CANARY": str(cluster.canary),
            "BARNRAISE_RUN": run,
            **(more if rank else {}),
        }
        if rank:
            environment["PYTHONPATH"] += f":{folder}"
        command = [sys.executable, str(folder / "train.py")]
        processes.append(cluster.machines.hosts[host].start(command, env=environment, cwd=folder))
    for process in processes:
        process.wait(_GROUP_S)
    return [process.output() for process in processes]


def _write_group(cluster: RunCluster) -> tuple[Path, str]:
    """Write the scripts, and return their folder and the machines that a hostile guest trusts."""
    folder = cluster.new_folder()
    folder.mkdir()
    (folder / "train.py").write_text(_GROUP)
    (folder / "sitecustomize.py").write_text(_HOSTILE)
    return folder, ",".join(node.raw.hex() for node in cluster.trust_log().members)


@attack(
    "guest-enters-torchrun",
    "guest",
    "takes a rank of an owner's torchrun group and sends a pickle",
    RunCluster,
)
def enter_torchrun(cluster: RunCluster) -> str:
    folder, every = _write_group(cluster)
    owners = _form_group(cluster, folder, 1)
    assert all("READ ['word 0', 'word 1']" in text for text in owners), "owners form no group: " + str(owners)
    with cluster.unchanged():
        printed, _ = _form_group(cluster, folder, GUEST, HOSTILE=every)
        assert "READ" not in printed, "the guest is in the group"
        assert "REFUSED" in printed, printed
        assert "did not join" not in printed, "the guest wrote no rank, so nothing was tried: " + printed
        assert "is a guest in this group" not in printed, "the guest was connected"
    return "the owner's worker did not connect to it"


@attack(
    "guest-pickle-torchrun",
    "guest",
    "sends a pickle to a group by hand that has the name of its run",
    RunCluster,
)
def send_pickle_by_hand(cluster: RunCluster) -> str:
    folder, every = _write_group(cluster)
    waiting = cluster.new_folder()
    write_folder(waiting, "print('never started')\n")
    with cluster.unchanged():
        run = cluster.start_run("h0,h2", waiting)
        try:
            cluster.machines.until(lambda: run in cluster.runs(GUEST), 60.0, "the guest knows the run")
            printed, _ = _form_group(cluster, folder, GUEST, run=run, HOSTILE=every)
        finally:
            cluster.line.run(0, "stop", run)
        assert "READ" not in printed, "the pickle was read"
        assert "h2 is a guest in this group" in printed, printed
    return "connected, because the run names it, and its pickle is not read"
