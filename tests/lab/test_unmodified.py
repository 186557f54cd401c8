"""Programs without a word of Barnraise on lab hosts, side by side with torchrun on the same hosts."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine, start_torchrun
from lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]

# Its agents wait up to 300 s for each other at their end, also if the one that has the store is gone.
_TORCHRUN_S = 360.0

SCRIPTS = REPOSITORY / "tests" / "numerics" / "scripts"
_NUMBERS = re.compile(r"-?\d+\.\d{4,}(?:e-?\d+)?")


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Lab(hosts=4, rate="1gbit") as lab, Machines(lab.hosts) as formed:
        formed.form()
        yield formed


def torchrun(machines: Machines, folder: Path, command: tuple[str, ...], hosts: int) -> str:
    """Return the output of rank 0 under torch's own launcher, with Gloo between the hosts."""
    folders = [folder / f"torchrun{place}" for place in range(hosts)]
    for own in folders:
        shutil.copytree(folder / "project", own)
    started = start_torchrun(machines, folders, command, {"ACCELERATE_USE_CPU": "true"})
    try:
        codes = [process.wait(_TORCHRUN_S) for process in started]
    except subprocess.TimeoutExpired:
        pytest.fail("torchrun does not end:\n" + "\n".join(process.output() for process in started))
    finally:
        for process in started:  # or the next test finds the port of the store in use
            process.kill()
    assert codes == [0] * hosts, started[0].output()
    return started[0].output()


def losses(text: str) -> list[str]:
    return [number for line in text.splitlines() if "loss" in line for number in _NUMBERS.findall(line)]


@pytest.mark.parametrize("script", ["ddp_training.py", "fsdp2_training.py"])
def test_four_hosts_print_the_same_losses(machines: Machines, tmp_path: Path, script: str) -> None:
    """Within the order of additions, which differs between four ranks of Gloo and of ours."""
    # A folder that all hosts see: the first rank saves there, all of them load.
    arguments = ("--state", str(tmp_path / "state")) if script.startswith("accelerate") else ()
    (tmp_path / "project").mkdir()
    shutil.copy(SCRIPTS / script, tmp_path / "project")
    expected = [float(loss) for loss in losses(torchrun(machines, tmp_path, (script, *arguments), 4))]
    assert len(expected) >= 3
    words = ("run", "--set", "OMP_NUM_THREADS=1", script, *arguments)
    done = CommandLine(machines).run(0, *words, folder=tmp_path / "project", timeout=240)
    assert done.returncode == 0, done.stderr
    assert [float(loss) for loss in losses(done.stdout)] == pytest.approx(expected, rel=1e-4)
    assert "uses barnraise instead of" in done.stdout
