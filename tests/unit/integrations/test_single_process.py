"""Accelerate in a worker sees one process, and the variables of the launcher stay."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from barnraise.integrations.single_process import keep_device

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


class Arguments:
    """Arguments of a Trainer that have chosen this device, of two GPUs."""

    def __init__(self, device: str, *, use_cpu: bool) -> None:
        self.__dict__["_setup_devices"] = torch.device(device)
        self.use_cpu, self._n_gpu = use_cpu, 2

    @property
    def device(self) -> torch.device:
        chosen = self.__dict__["_setup_devices"]
        assert isinstance(chosen, torch.device)
        return chosen


@pytest.mark.parametrize(
    ("assigned", "chosen", "use_cpu", "expected", "current"),
    [
        ("cuda:1", "cuda:0", False, "cuda:1", ["cuda:1"]),
        ("cuda:0", "cuda:0", False, "cuda:0", []),
        ("mps", "mps:0", False, "mps:0", []),
        ("cpu", "cuda:0", False, "cpu", []),
        ("cuda:1", "cpu", True, "cpu", []),
        ("", "cuda:0", False, "cuda:0", []),
    ],
)
def test_trainer_takes_the_device_that_the_agent_assigned(
    assigned: str,
    chosen: str,
    expected: str,
    current: list[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    use_cpu: bool,
) -> None:
    set_devices: list[str] = []
    monkeypatch.setenv("BARNRAISE_DEVICE", assigned)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: set_devices.append(str(device)))
    arguments = Arguments(chosen, use_cpu=use_cpu)
    keep_device(arguments)
    assert arguments.device == torch.device(expected)
    assert set_devices == current
    assert arguments._n_gpu == (2 if expected == chosen else 0 if expected == "cpu" else 1)
