"""The first hour of a new user: run this package with ``python -m``; ``--quick`` writes no recordings (root).

Types on three machines what README.md tells a new user to type. It begins with the installation, and ends
with the first step of a run on all three. Each machine is a host of the lab with its own name, home directory
and terminal of 80 columns. Packages come from a folder on disk: how long a download takes is not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.agents.runs import PAIRING_CODE
from benchmarks.newcomer.recording import Owner, cast, owner_of, silent_seconds, text_with_times, wide_lines
from lab import Lab
from lab.systems.build import read_requirements
from lab.terminal import Terminal, TypedCommand

NAMES = ("mac", "pc", "nas")
FIRST_STEP = r"step \d+ of|epoch 0"  # the first of the two that appears
ANSWER = "Install torch now"
_REQUIREMENTS = report.REPOSITORY / ".ci" / "requirements.txt"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_INSTALL_S, _PAIR_S, _TRAIN_S = 1200.0, 300.0, 600.0


@dataclass
class Machine:
    """A machine of the new user: its terminal, and the folder where the repository was copied to."""

    name: str
    home: Path
    terminal: Terminal
    answers: int = 0

    def type(self, line: str) -> TypedCommand:
        print(f"{self.name}$ {line}", flush=True)
        return self.terminal.type(line)

    def run(self, line: str, timeout: float) -> TypedCommand:
        """Type a command, and demand that it succeeds."""
        command = self.type(line)
        self.finish(command, timeout)
        return command

    def finish(self, command: TypedCommand, timeout: float) -> None:
        code = self.terminal.wait(command, timeout)
        if code != 0:
            raise SystemExit(f"on {self.name}, {command.line!r} ended with {code}:\n{command.output}")

    def agree_to_torch(self, command: TypedCommand) -> None:
        """Answer the question about torch with Enter."""
        self.terminal.until(command, ANSWER, _PAIR_S)
        self.answers += 1
        self.terminal.press("\n")


def download(folder: Path, repository: Path) -> None:
    """Download everything that the installation needs, with this machine's own pip and its settings."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    torch = [*words, *read_requirements(_REQUIREMENTS, ["torch"]), "--extra-index-url", _TORCH_INDEX]
    for command in ([*words, str(repository), "hatchling>=1.26"], torch):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def copy_repository(folder: Path) -> None:
    """Copy what git knows of this repository, as a user gets it."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=report.REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    for name in names.rstrip("\0").split("\0"):
        source = report.REPOSITORY / name
        if source.is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def type_everything(machines: list[Machine]) -> None:
    """Type the commands of README.md, from the installation to the first step."""
    mac, pc, nas = machines
    mac.run("python3 -m venv .venv", _INSTALL_S)
    mac.run("source .venv/bin/activate", _INSTALL_S)
    mac.run("pip install .", _INSTALL_S)
    for other in (pc, nas):
        other.run("python3 -m venv .venv", _INSTALL_S)
        other.run(".venv/bin/pip install .", _INSTALL_S)
    installing = [(mac, mac.type("barnraise pair --machines 2"))]
    pairing = installing[0][1]
    for number, other in enumerate((pc, nas), 1):
        mac.terminal.until(pairing, rf"(?s)machine {number} of 2 run:.*expires", _PAIR_S)
        joining = other.type(f".venv/bin/barnraise join {PAIRING_CODE.findall(pairing.output)[-1]}")
        other.agree_to_torch(joining)
        installing.append((other, joining))
    mac.agree_to_torch(pairing)
    for machine, command in installing:
        machine.finish(command, _INSTALL_S)
    mac.run("cd ~/spiral", _PAIR_S)
    training = mac.type("barnraise run train.py")
    mac.terminal.until(training, FIRST_STEP, _TRAIN_S)


def figures(machines: list[Machine], begin_s: float, end_s: float) -> dict[str, object]:
    """Return the figures of everything that was typed."""
    commands = [command for machine in machines for command in machine.terminal.commands]
    silent: dict[Owner, float] = {"ours": 0.0, "pip": 0.0, "venv": 0.0}
    wide: dict[Owner, int] = {"ours": 0, "pip": 0, "venv": 0}
    for command in commands:
        silent[owner_of(command.line)] += silent_seconds(command, end_s)
        wide[owner_of(command.line)] += len(wide_lines(command))
    return {
        "commands": len(commands),
        "answers": sum(machine.answers for machine in machines),
        "silent_s": silent["ours"],
        "silent_pip_s": silent["pip"],
        "silent_venv_s": silent["venv"],
        "wide_lines": wide["ours"],
        "wide_lines_pip": wide["pip"],
        "seconds": end_s - begin_s,
    }


def show(machines: list[Machine], end_s: float) -> None:
    """Print one row for each command, and every line that is too wide."""
    rows = []
    for machine in machines:
        for command in machine.terminal.commands:
            lasted = (command.end_s or end_s) - command.begin_s
            silent = silent_seconds(command, end_s)
            rows.append((f"{machine.name}$ {command.line}", lasted, silent, len(wide_lines(command))))
    print(report.table(("command", "seconds", "silent", "wide"), rows))
    for machine in machines:
        for command in machine.terminal.commands:
            if owner_of(command.line) == "ours":
                for line in wide_lines(command):
                    print(f"too wide, on {machine.name}: {line}")


def write_recordings(machines: list[Machine], folder: Path) -> None:
    """Write each machine's terminal as a text with times, and for asciinema."""
    folder.mkdir(parents=True, exist_ok=True)
    for machine in machines:
        terminal = machine.terminal
        text = text_with_times(terminal.printed, terminal.begin_s)
        (folder / f"{machine.name}.txt").write_text(text, encoding="utf-8")
        (folder / f"{machine.name}.cast").write_text(cast(terminal, machine.name), encoding="utf-8")


def measure(recordings: Path | None) -> dict[str, object]:
    """Prepare three machines, type everything, and return the figures."""
    with tempfile.TemporaryDirectory(prefix="by-n-") as directory, contextlib.ExitStack() as stack:
        room = Path(directory)
        repository, packages = room / "barnraise", room / "packages"
        copy_repository(repository)
        download(packages, repository)
        machines = []
        lab = stack.enter_context(Lab(hosts=len(NAMES)))
        for host, name in zip(lab.hosts, NAMES, strict=True):
            host.host_name = name
            home = room / name
            shutil.copytree(repository, home / "barnraise")
            (home / "spiral").mkdir()
            shutil.copy(report.REPOSITORY / "examples" / "train.py", home / "spiral")
            variables = {
                "HOME": str(home),
                "PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin",
                "LANG": "C.UTF-8",
                "PIP_NO_INDEX": "1",
                "PIP_FIND_LINKS": str(packages),
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            }
            terminal = stack.enter_context(Terminal(host, variables, home / "barnraise"))
            machines.append(Machine(name, home, terminal))
        begin_s = time.monotonic()
        try:
            type_everything(machines)
        finally:
            end_s = time.monotonic()
            show(machines, end_s)
            if recordings is not None:
                write_recordings(machines, recordings)
                print(f"recordings: {recordings}")
        return figures(machines, begin_s, end_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="write no recordings")
    parser.add_argument("--recordings", type=Path, default=Path("newcomer"), help="folder of the recordings")
    options = parser.parse_args()
    print(report.environment_line(), flush=True)
    report.last_line(measure(None if options.quick else options.recordings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
