"""A link of several streams sums as one stream does, under TLS, between real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.hub.process import free_port
from tests.arch.source_tree import ROOT, SOURCE

_SCRIPT = """
import sys, time
import torch, torch.distributed as dist
from barnraise import collectives
from barnraise.collectives.client import statistics
rank, path = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
group = collectives.create_group(dist.FileStore(path, 2), rank, 2, 60)
expected = torch.arange(3_000_001, dtype=torch.float64) * 2 + 1
deadline = time.monotonic() + 100
turns, is_over = 0, 0
while not is_over and turns < 5:
    tensor = torch.arange(3_000_001, dtype=torch.float64) + rank
    group.allreduce([tensor]).wait()
    assert torch.equal(tensor, expected)
    # Both go on or neither does: one may see the streams, or the end of its time, before the other.
    has_all = all("3 streams" in link for link in statistics()["links"])
    seen = torch.tensor([int(has_all), int(time.monotonic() > deadline)])
    group.allreduce([seen]).wait()
    turns, is_over = turns + int(seen[0] == 2), int(seen[1])
print(turns, statistics()["links"], flush=True)
group.barrier().wait()
group.shutdown()
"""


def test_three_streams_give_same_results_as_one(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")},
        "BARNRAISE_CONFIG": str(tmp_path / "config.toml"),
        "BARNRAISE_STATE_DIRECTORY": str(tmp_path / "state"),
        "BARNRAISE_NETWORK_PORT": str(free_port()),
        "BARNRAISE_NETWORK_STREAMS": "3",
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=220)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert all(output.startswith("5 ") and "TLS" in output for output in outputs), outputs
