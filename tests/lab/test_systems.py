"""Hosts of other systems: their Python, and our command line in it. See `python -m lab prepare`."""

from __future__ import annotations

import pytest

from lab import ARM64, LINUX, WINDOWS, Lab
from lab.systems import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.skipif(WINDOWS.why_unavailable() is not None, reason=str(WINDOWS.why_unavailable()))
def test_windows_host_runs_python_and_the_command_line() -> None:
    with Lab(hosts=[LINUX, WINDOWS]) as lab:
        host = lab.hosts[1]
        assert host.run([host.python, "-c", "import sys; print(sys.platform)"]).stdout.strip() == "win32"
        shown = host.run([host.python, "-m", "barnraise.cli.main", "--version"], timeout=120)
        assert shown.stdout.startswith("barnraise ")
        own = {"BARNRAISE_STATE_DIRECTORY": r"C:\users\root\barnraise"}
        created = host.run([host.python, "-m", "barnraise.cli.main", "id"], env=own, timeout=120)
        assert created.stdout.count("-") == 13, "a node id"


@pytest.mark.skipif(ARM64.why_unavailable() is not None, reason=str(ARM64.why_unavailable()))
def test_arm64_host_runs_python_and_the_command_line() -> None:
    with Lab(hosts=[LINUX, ARM64]) as lab:
        host = lab.hosts[1]
        machine = host.run([host.python, "-c", "import platform; print(platform.machine())"])
        assert machine.stdout.strip() == "aarch64"
        shown = host.run([host.python, "-m", "barnraise.cli.main", "--version"], timeout=120)
        assert shown.stdout.startswith("barnraise ")


@pytest.mark.skipif(ARM64.why_unavailable() is not None, reason=str(ARM64.why_unavailable()))
def test_arm64_host_computes_with_torch() -> None:
    with Lab(hosts=[LINUX, ARM64]) as lab:
        host = lab.hosts[1]
        product = (
            "import torch; x = torch.arange(144.).reshape(24, 6).cos();"
            "layer = torch.nn.Linear(6, 10);"
            "exact = x.double() @ layer.weight.double().T + layer.bias.double();"
            "print((layer(x) - exact).abs().max().item() < 1e-5)"
        )
        assert host.run([host.python, "-c", product], timeout=240).stdout.strip() == "True"


@pytest.mark.parametrize("system", [WINDOWS, ARM64], ids=["windows", "arm64"])
def test_torch_finds_our_backend(system: System) -> None:
    if (reason := system.why_unavailable()) is not None:
        pytest.skip(reason)
    with Lab(hosts=[LINUX, system]) as lab:
        host = lab.hosts[1]
        known = "import torch.distributed as dist; print(dist.Backend.backend_list)"
        assert "'barnraise'" in host.run([host.python, "-c", known], timeout=280).stdout
