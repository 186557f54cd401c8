"""Progress of a real run as a person sees it, with and without a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
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
    step = "            optimizer.zero_grad()\n"
    assert step in text
    text = text.replace("run.epochs(16)", "run.epochs(1)")
    return "import time\n" + text.replace(step, step + "            time.sleep(0.04)\n", 1)


def _in_terminal(line: CommandLine, folder: Path, *words: str) -> str:
    """Return what a command on the first machine writes to a terminal of 80 columns."""
    own, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**line.machines.environment(0), "TERM": "xterm"}
    process = line.machines.hosts[0].start(line.command(*words), env=environment, cwd=folder, stdout=other)
    os.close(other)
    written = b""
    with contextlib.suppress(OSError):  # the terminal is closed
        while part := os.read(own, 65536):
            written += part
    os.close(own)
    assert process.wait(30.0) == 0, written.decode("utf-8", "replace")
    return written.decode("utf-8", "replace")


def _screen(written: str) -> list[str]:
    """Return the lines that remain on the terminal, and check that no line is too long for it."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[A|\x1b\[K|\x1b\[[0-9;]*m|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[A":
            row -= 1
        elif part == "\x1b[K":
            lines[row] = lines[row][:column]
        elif part == "\r":
            column = 0
        elif part[0] != "\x1b":
            lines[row] = lines[row][:column] + part + lines[row][column + len(part) :]
            column += len(part)
            assert column <= 80 or "barnraise: run" in lines[row], lines[row]
    return [line.rstrip() for line in lines]


def test_run_redraws_progress_and_bars_of_the_script_at_a_terminal(line: CommandLine, tmp_path: Path) -> None:
    loop = "for batch in batches:"
    text = _slow_session()
    assert loop in text
    bar = "for batch in tqdm(batches, desc='bar', disable=not run.is_main):"
    write_folder(tmp_path, "from tqdm import tqdm\n" + text.replace(loop, bar))
    written = _in_terminal(line, tmp_path, "run", "train.py")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written)
    assert re.search(r"barnraise: the script starts on mac, pc \(\d+ s\)", plain)
    steps = {int(step) for step in re.findall(r"barnraise: step (\d+) of 64, ", plain)}
    assert len(steps) >= 4, "about one a second"
    bars = set(re.findall(r"mac bar: +(\d+%)", plain))
    assert len(bars) >= 4, "the bar of the script moves"
    assert re.search(r"mac bar: 100%.* 64/64 ", plain), "it counts steps, and reaches its total"
    screen = _screen(written)
    assert len([text for text in screen if text.startswith("mac bar: ")]) == 1, "only its last state stays"
    assert not [text for text in screen if text.startswith("barnraise: step")], (
        "nor does the line about progress"
    )
    assert len([text for text in screen if text.startswith("mac epoch 0  loss")]) == 1
    name = re.search(r"barnraise: run (train-\w+) of", plain)
    assert name is not None
    logs = line.run(1, "logs", name[1], folder=tmp_path).stdout
    assert logs.count("bar: ") == 1, "only its last state is in the log"


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


def test_build_of_an_environment_is_announced_and_followed(line: CommandLine, tmp_path: Path) -> None:
    write_folder(tmp_path, "print('hello')\n", extra={"requirements.txt": "--no-index\n"})
    done = line.run(0, "run", "--separate", "train.py", folder=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "hello" in done.stdout
    assert "barnraise: each machine builds an environment from requirements.txt" in done.stderr
    assert re.search(r"barnraise: .*environment .*requirements\.txt.* \(\d+ s\)", done.stderr), done.stderr
    again = line.run(0, "run", "--separate", "train.py", folder=tmp_path, timeout=200)
    assert again.returncode == 0, again.stderr
    assert "builds an environment" not in again.stderr, "it is there already"
