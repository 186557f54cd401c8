"""Commands of a new user after the first ten minutes, on three machines, and their output."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine, write_folder
from benchmarks.newcomer.five_runs import PLAIN
from lab import Lab
from tests.repository import ROOT

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(300)]

NAMES = ("mac", "pc", "nas")
# The worker of one machine raises once, after some steps; its restart does not.
CRASH = """
            if os.environ["RANK"] == "1" and run.step >= 8 and not os.path.exists(os.environ["MARK"]):
                open(os.environ["MARK"], "w").close()
                raise ValueError("no such label")
"""


@pytest.fixture(scope="module")
def line() -> Iterator[CommandLine]:
    with Lab(hosts=3) as lab, Machines(lab.hosts) as machines:
        for place, name in enumerate(NAMES):
            machines.start(place)
            machines.rename(place, name)
        for place in (1, 2):
            machines.pair(0, place)
        machines.until(lambda: machines.agree(range(3)), 60.0, "all agree")
        yield CommandLine(machines)


def _type(line: CommandLine, place: int, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return line.run(place, *words, folder=folder, timeout=200)


def _run_name(text: str) -> str:
    name = re.search(r"barnraise: run (train-\w+) of", text)
    assert name is not None, text
    return name[1]


def _crashing_session() -> str:
    text = (ROOT / "examples" / "train.py").read_text(encoding="utf-8")
    text = text.replace("run.epochs(16)", "run.epochs(8)")
    step = "            optimizer.zero_grad()\n"
    assert step in text
    # Every machine prints, as in scripts that were not written for several machines.
    printed = "    print(f\"machine {os.environ['RANK']} ends epoch {epoch}\")\nrun.save"
    return "import os\n" + text.replace(step, step + CRASH, 1).replace("run.save", printed, 1)


def test_plain_script_is_not_trained_three_times(line: CommandLine, tmp_path: Path) -> None:
    write_folder(tmp_path, PLAIN)
    done = _type(line, 0, "run", "train.py", folder=tmp_path)
    assert done.returncode == 1
    assert "each of 3 workers would train its own copy of the model; nothing was started" in done.stderr
    assert "+for epoch in run.epochs(3):" in done.stderr
    assert "epoch 0" not in done.stdout
    # What it says to type works: the three machines then train one model.
    assert "barnraise adapt --write train.py" in done.stderr
    assert _type(line, 0, "adapt", "--write", "train.py", folder=tmp_path).returncode == 0
    adapted = _type(line, 0, "run", "train.py", folder=tmp_path)
    assert adapted.returncode == 0, adapted.stderr
    assert [text for text in adapted.stdout.splitlines() if "epoch 0" in text] != []
    assert adapted.stdout.count("epoch 0 ") == 1, "each line once"
    assert (tmp_path / "barnraise-runs" / _run_name(adapted.stderr) / "model.pt").exists()


def test_plain_script_runs_separately_or_on_one_machine(line: CommandLine, tmp_path: Path) -> None:
    write_folder(tmp_path, PLAIN)
    alone = _type(line, 0, "run", "--on", "pc", "train.py", folder=tmp_path)
    assert alone.returncode == 0, alone.stderr
    separate = _type(line, 0, "run", "--separate", "--all", "train.py", folder=tmp_path)
    assert separate.returncode == 0, separate.stderr
    assert separate.stdout.count("epoch 2 ") == 3


def test_crash_on_one_machine_is_named_everywhere_and_afterwards(line: CommandLine, tmp_path: Path) -> None:
    write_folder(tmp_path, _crashing_session())
    mark = tmp_path / "crashed"
    done = _type(line, 0, "run", "--set", f"MARK={mark}", "train.py", folder=tmp_path)
    assert mark.exists()
    assert done.returncode == 3, done.stderr
    summary = re.search(
        r"barnraise: (\w+): ValueError: no such label \(train\.py:\d+\); restarted", done.stderr
    )
    assert summary is not None, done.stderr
    assert "does not respond" not in done.stderr, "it has failed, and its machine knows that"
    run = _run_name(done.stderr)
    for place in range(3):
        shown = _type(line, place, "ps", run, folder=tmp_path).stdout
        assert f"on {summary[1]}: ValueError: no such label (train.py:" in shown
        assert 'raise ValueError("no such label")' in shown, "the traceback"
        logs = _type(line, place, "logs", run, "--all", folder=tmp_path).stdout
        assert 'raise ValueError("no such label")' in logs
        for name in NAMES:
            lines = [text for text in logs.splitlines() if text.startswith(name) and "ends epoch 7" in text]
            assert len(lines) == 1, f"{name} is labelled, each line once:\n{logs}"


def test_error_on_all_machines_is_shown_once_and_names_them(line: CommandLine, tmp_path: Path) -> None:
    script = "import barnraise\nrun = barnraise.init()\ncount = input('epochs: ')\n"
    write_folder(tmp_path, script)
    done = _type(line, 0, "run", "train.py", folder=tmp_path)
    assert done.returncode == 1
    printed = done.stdout + done.stderr
    assert printed.count("Traceback (most recent call last)") == 1, printed
    last = [text for text in done.stderr.splitlines() if text.startswith("barnraise: ")][-1]
    assert re.search(r"failed: EOFError: .* \(train\.py:3\), on (all 3 machines|\w+)", last), last
    assert "Workers have no keyboard" in done.stderr


def test_end_of_one_machine_replays_nothing(line: CommandLine, tmp_path: Path) -> None:
    text = (ROOT / "examples" / "train.py").read_text(encoding="utf-8")
    text = text.replace("run.print(", "print(").replace("run.epochs(16)", "run.epochs(4)")
    write_folder(tmp_path, text)
    done = _type(line, 0, "run", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    epochs = re.findall(r"epoch (\d+)  loss", done.stdout)
    assert epochs == list(map(str, range(4))), done.stdout
    assert "disappeared" not in done.stderr, "they have finished"


def test_join_is_undone_by_the_line_that_it_prints(line: CommandLine, tmp_path: Path) -> None:
    """Last: the third machine leaves, and the others stay together."""
    machines = line.machines
    offered = line.start(0, "pair", folder=tmp_path)
    machines.until(lambda: "barnraise join" in offered.output(), 30.0, "a code")
    code = re.search(r"barnraise join (\S+)", offered.output())
    assert code is not None
    assert _type(line, 2, "leave", "--yes", folder=tmp_path).returncode == 0
    machines.agents[2] = None
    machines.start(2)
    joined = _type(line, 2, "join", code[1], folder=tmp_path)
    assert joined.returncode == 0, joined.stderr
    undo = re.search(r"Undo: barnraise (.+)", joined.stdout)
    assert undo is not None, joined.stdout
    assert _type(line, 2, *undo[1].split(), "--yes", folder=tmp_path).returncode == 0
    machines.agents[2] = None
    machines.until(lambda: machines.agree(range(2)), 60.0, "the others agree")
    assert "pc" in _type(line, 0, "status", folder=tmp_path).stdout


def test_second_machine_with_a_name_gets_another_and_all_sides_are_told(
    line: CommandLine, tmp_path: Path
) -> None:
    """After the last: the third machine comes back, under the name of the second."""
    machines = line.machines
    if machines.agents[2] is not None:
        assert _type(line, 2, "leave", "--yes", folder=tmp_path).returncode == 0
        machines.agents[2] = None
    machines.start(2)
    machines.rename(2, "pc")
    offered = line.start(0, "pair", folder=tmp_path)
    machines.until(lambda: "barnraise join" in offered.output(), 30.0, "a code")
    code = re.search(r"barnraise join (\S+)", offered.output())
    assert code is not None
    joined = _type(line, 2, "join", code[1], folder=tmp_path)
    assert joined.returncode == 0, joined.stderr
    names = re.search(r"2 machines are called pc: pc and (pc-\w{4}) \(this machine\)\.", joined.stdout)
    assert names is not None, joined.stdout
    later = names[1]
    machines.until(lambda: "Undo:" in offered.output(), 30.0, "the end of `pair`")
    assert f"2 machines are called pc: pc and {later}.\n" in offered.output()
    assert f"Undo: barnraise unpair {later}" in offered.output()
    machines.until(lambda: machines.agree(range(3)), 60.0, "all agree")
    older = _type(line, 1, "status", folder=tmp_path).stdout
    assert f"2 machines are called pc: pc (this machine) and {later}. To rename" in older
    refused = _type(line, 2, "rename", "mac", folder=tmp_path)
    assert "another machine of this cluster is called mac already" in refused.stderr
    assert _type(line, 2, "rename", "box", folder=tmp_path).returncode == 0
    machines.until(
        lambda: "machines are called" not in _type(line, 1, "status", folder=tmp_path).stdout,
        30.0,
        "no clash",
    )
