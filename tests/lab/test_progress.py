"""Progress of a real run as a person sees it, with and without a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine, write_folder
from lab import Lab
from tests.repository import ROOT

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(300)]

PROGRESS = re.compile(
    r"^barnraise: step [\d,]+ of 64, loss [\d.]+, [\d,.]+k? samples/s, 2 machines, \d+ (s|min) left$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def line() -> Iterator[CommandLine]:
    with Lab(hosts=2) as lab, Machines(lab.hosts) as machines:
        for place, name in enumerate(("mac", "pc")):
            machines.start(place)
            machines.rename(place, name)
        machines.pair(0, 1)
        machines.until(lambda: machines.agree(range(2)), 60.0, "both agree")
        yield CommandLine(machines)


def _slow_session() -> str:
    """Return the example with few but slow steps, so that there is something to watch."""
    text = (ROOT / "examples" / "train.py").read_text(encoding="utf-8")
    step = "        optimizer.step()\n"
    assert step in text
    text = text.replace("run.epochs(16)", "run.epochs(1)")
    return "import time\n" + text.replace(step, step + "        time.sleep(0.04)\n", 1)


def test_run_prints_progress_lines_without_a_terminal(line: CommandLine, tmp_path: Path) -> None:
    write_folder(tmp_path, _slow_session())
    done = line.run(0, "run", "train.py", folder=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    assert PROGRESS.search(done.stderr), done.stderr
    assert "samples/s" not in done.stdout, "the script's own output stays clean"
    assert "\r" not in done.stderr
    name = re.search(r"barnraise: run (train-\w+) of", done.stderr)
    assert name is not None
    shown = line.run(1, "ps", name[1], folder=tmp_path).stdout
    assert re.search(r"^step 64 of 64, loss [\d.]+$", shown, re.MULTILINE), shown
