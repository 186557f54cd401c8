"""Remote calls between lab hosts: in a plain group, in a session, and torch's own, which are refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine
from lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

PROGRAM = Path(__file__).with_name("rpc_program.py")


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Lab(hosts=3, rate="1gbit") as lab, Machines(lab.hosts) as formed:
        formed.form()
        yield formed


def run(machines: Machines, folder: Path, *words: str) -> str:
    """Run the program on all hosts, and return what they printed."""
    shutil.copy(PROGRAM, folder / "program.py")
    command = CommandLine(machines)
    done = command.run(0, "run", "--set", "OMP_NUM_THREADS=1", *words, folder=folder, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["group", "session"])
def test_hosts_call_each_other_and_leave_nothing_behind(
    machines: Machines, tmp_path: Path, kind: str
) -> None:
    printed = run(machines, tmp_path, "program.py", kind)
    ends = re.findall(r"rank (\d) of 3 .*'leaked': (\d+).*'objects': (\d+)", printed)
    assert sorted(ends) == [(str(rank), "0", "0") for rank in range(3)], printed


def test_rpc_of_torch_is_refused_between_hosts(machines: Machines, tmp_path: Path) -> None:
    printed = run(machines, tmp_path, "program.py", "torch")
    sentence = "refused: [unsupported-operation] torch's RPC is not used between machines"
    assert printed.count(sentence) == 3, printed
