"""Inside a cluster a script needs no address, rank or port, and the store outlives the coordinator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.agents.machines import Machines
from lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_TRAIN = """
import sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("barnraise")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
model(torch.ones(4, 8) * (rank + 1)).sum().backward()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
print("trained", rank, world, total.item(), model.module.weight.grad[0, 0].item(), flush=True)
if "--stay" in sys.argv:
    store = dist.distributed_c10d._get_default_store()
    if rank == 0: store.set("before", "the death")
    dist.barrier()
    print("ready", flush=True)
    sys.stdin.readline()
    print("kept", store.get("before").decode(), store.add("count", 1), flush=True)
dist.destroy_process_group()
"""


def _start(machines: Machines, place: int, script: Path, *words: str) -> subprocess.Popen[str]:
    namespace = machines.hosts[place].namespace
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, str(script), *words],
        env=machines.environment(place),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_script_without_address_finds_its_group(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_TRAIN)
    with Lab(hosts=3) as lab, Machines(lab.hosts) as machines:
        machines.form()
        processes = [_start(machines, place, script) for place in range(3)]
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        lines = [line.split() for text in outputs for line in text.splitlines() if line.startswith("trained")]
        assert sorted(line[1] for line in lines) == ["0", "1", "2"], "\n".join(outputs)
        assert {(line[2], float(line[3]), float(line[4])) for line in lines} == {("3", 3.0, 8.0)}


def test_store_survives_death_of_coordinator(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_TRAIN)
    with Lab(hosts=4) as lab, Machines(lab.hosts) as machines:
        machines.form()
        coordinator = int(machines.status(0).coordinator[1:])
        others = [place for place in range(4) if place != coordinator]
        machines.extra = {"BARNRAISE_WORLD": "3"}
        processes = [_start(machines, place, script, "--stay") for place in others]
        for process in processes:
            seen = ""
            while "ready" not in seen:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line, seen
                seen += line
        machines.kill(coordinator)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        kept = sorted(line for text in outputs for line in text.splitlines() if line.startswith("kept"))
        assert kept == [f"kept the death {count}" for count in (1, 2, 3)], "\n".join(outputs)
