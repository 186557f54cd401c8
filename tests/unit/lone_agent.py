"""A single agent without a cluster, as a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import barnraise
from barnraise.agent_client.kv_client import agent_at, ask_cluster
from barnraise.core.errors import BarnraiseError
from benchmarks.hub.process import free_port

SOURCE = str(Path(barnraise.__file__).parents[1])


def unsettled(**variables: str) -> dict[str, str]:
    """Return this process's environment without variables that lead to other agents and groups."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("BARNRAISE_", "MASTER_"))
    }
    usual = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return {**kept, **usual, **variables}


@contextlib.contextmanager
def lone_agent() -> Iterator[Path]:
    """Run an agent until the context exits, and yield its state directory."""
    port = str(free_port())
    with tempfile.TemporaryDirectory(prefix="by-") as directory:
        state = Path(directory) / "state"
        environment = unsettled(
            BARNRAISE_STATE_DIRECTORY=str(state), BARNRAISE_NETWORK_PORT=port, BARNRAISE_DISCOVERY_METHODS=""
        )
        with open(Path(directory) / "log", "w+") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "barnraise.agent"], env=environment, stdout=log, stderr=log
            )
            try:
                deadline = time.monotonic() + 90
                while _world(state) != 1:
                    log.seek(0)
                    assert process.poll() is None, log.read()
                    assert time.monotonic() < deadline, log.read()
                    time.sleep(0.1)
                yield state
            finally:
                process.terminate()
                process.wait(90)


def _world(state: Path) -> int:
    try:
        return ask_cluster(agent_at(state)).world
    except BarnraiseError:
        return 0
