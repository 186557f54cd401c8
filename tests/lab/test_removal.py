"""A machine is removed while its worker is in a group or a run: the others go on without it at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from barnraise.agent_client.cluster_requests import RequestDone, UnpairRequest
from barnraise.agent_client.run_requests import RunRow, WatchRequest, WatchResponse
from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine, write_folder
from lab import Lab, LabProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_SUMS = """
import os
import torch, torch.distributed as dist
dist.init_process_group("barnraise")
total = torch.ones(1)
dist.all_reduce(total)
print("SUM", total.item(), flush=True)
try:
    while True:
        dist.all_reduce(total)
except Exception as error:
    print("LOST", error, flush=True)
"""


def _start(machines: Machines, rank: int, script: Path, address: str) -> LabProcess:
    environment = machines.environment(rank) | {
        "MASTER_ADDR": address,
        "MASTER_PORT": "7400",
        "RANK": str(rank),
        "WORLD_SIZE": "2",
    }
    return machines.hosts[rank].start([sys.executable, str(script)], env=environment)


def test_removal_cuts_links_of_running_workers(tmp_path: Path) -> None:
    """The worker of a removed owner goes on to send; without the cut the group would never end."""
    script = tmp_path / "sums.py"
    script.write_text(_SUMS)
    with Lab(hosts=3) as lab, Machines(lab.hosts) as machines:
        machines.form()
        ranks = [_start(machines, rank, script, lab.hosts[0].address) for rank in range(2)]
        machines.until(lambda: all("SUM 2.0" in rank.output() for rank in ranks), 120.0, "they sum")
        machines.ask(0, UnpairRequest("h1"), RequestDone)
        machines.until(lambda: "LOST" in ranks[0].output(), 60.0, "the owner's worker has cut its link")
        assert "its machine was removed from the cluster" in ranks[0].output()


def test_removal_restarts_run_on_the_other_machines(tmp_path: Path) -> None:
    """The removed machine stays switched on, and its worker goes on."""
    write_folder(tmp_path / "work", "import time\nwhile True: time.sleep(0.1)\n")
    with Lab(hosts=3) as lab, Machines(lab.hosts) as machines:
        machines.form()
        words = ("run", "--detach", "--on", "h0,h1,h2", "train.py")
        started = CommandLine(machines).run(0, *words, folder=tmp_path / "work")
        assert started.returncode == 0, started.stderr
        run = started.stdout.split()[-1]

        def row() -> RunRow:
            return machines.ask(0, WatchRequest(run=run, wait_s=0), WatchResponse).row

        machines.until(lambda: row().phase == "running", 120.0, "the run is running")
        assert row().machines == ("h0", "h1", "h2")
        machines.ask(0, UnpairRequest("h2"), RequestDone)
        machines.until(
            lambda: row().phase == "running" and row().machines == ("h0", "h1"), 90.0, "it runs on two"
        )
