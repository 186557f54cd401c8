"""Accelerate in a worker sees one process, and the variables of the launcher stay."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """\
import os
from barnraise.integrations.single_process import keep_accelerate_single
keep_accelerate_single()
keep_accelerate_single()
from accelerate.state import PartialState
state = PartialState(cpu=CPU)
print(state.num_processes, state.device, os.environ["RANK"], os.environ["LOCAL_RANK"])
"""


@pytest.mark.parametrize(
    ("is_on_cpu", "assigned", "expected"),
    [(True, "cpu", "cpu"), (False, "cpu", "cpu"), (True, "meta", "cpu"), (False, "meta", "meta")],
)
def test_accelerate_in_a_worker_starts_no_process_group(
    assigned: str, expected: str, *, is_on_cpu: bool
) -> None:
    launched = {
        "BARNRAISE_LAUNCHED": "1",
        "BARNRAISE_DEVICE": assigned,
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "barnraise.invalid",
        "MASTER_PORT": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("CPU", str(is_on_cpu))],
        env={**os.environ, **launched},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", expected, "1", "0"]
