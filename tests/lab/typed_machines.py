"""Machines of a new user in the lab: each with its own name, home directory and terminal of 80 columns."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.agents.runs import PAIRING_CODE
from lab import Host, Lab
from lab.terminal import COLUMNS, Terminal, TypedCommand
from tests.repository import ROOT

PATIENCE_S = 240.0
_COMMAND = f"""\
#!/bin/sh
exec "{sys.executable}" -P -c 'import sys; sys.argv[0] = "barnraise"
from barnraise.cli.main import main; main()' "$@"
"""
# Python without torch: no import finds it, and no list of packages names it.
_WITHOUT_TORCH = """\
import importlib.machinery, importlib.metadata, sys

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "torch" else super().find_spec(name, path, target)

def version(name, known=importlib.metadata.version):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
importlib.metadata.version = version
"""


class TypedMachine:
    """A machine and the person at it. ``folder`` is where the person works."""

    def __init__(self, host: Host, room: Path, name: str, *, torch: bool = True) -> None:
        host.host_name = name
        self.host, self.name = host, name
        self.home = room / host.name
        self.folder = self.home / "spiral"
        self.folder.mkdir(parents=True)
        programs = self.home / "bin"
        programs.mkdir()
        (programs / "barnraise").write_text(_COMMAND)
        (programs / "barnraise").chmod(0o755)
        path = f"{ROOT / 'src'}:{ROOT}"
        if not torch:
            (self.home / "without-torch").mkdir()
            (self.home / "without-torch" / "sitecustomize.py").write_text(_WITHOUT_TORCH)
            path = f"{self.home / 'without-torch'}:{path}"
        self._variables = {
            "HOME": str(self.home),
            "PATH": f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": path,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",  # the machines share the cores of one computer
        }
        self.terminal = Terminal(host, self._variables, self.folder)

    def type(self, line: str, code: int | None = 0) -> str:
        """Type a command, see that it ends with this code (None: any), and return what is on the screen."""
        command = self.terminal.run(line, PATIENCE_S)
        if code is not None and command.code != code:
            raise AssertionError(f"on {self.name}, {line!r} ended with {command.code}:\n{command.output}")
        return command.output

    def open(self, line: str) -> TypedCommand:
        """Type a command that goes on while others are typed elsewhere."""
        return self.terminal.type(line)

    def until(self, command: TypedCommand, pattern: str) -> re.Match[str]:
        return self.terminal.until(command, pattern, PATIENCE_S)

    def ended(self, command: TypedCommand, code: int) -> str:
        """Wait for the end of a command, see that it has this code, and return what is on the screen."""
        ended = self.terminal.wait(command, PATIENCE_S)
        if ended != code:
            raise AssertionError(f"on {self.name}, {command.line!r} ended with {ended}:\n{command.output}")
        return command.output

    def write(self, script: str, **files: str) -> None:
        """Write a new project: a script train.py, and other files beside it."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        (self.folder / "train.py").write_text(script)
        for name, text in files.items():
            (self.folder / name).write_text(text)
        self.type(f"cd {self.folder}")

    def new_terminal(self) -> None:
        """Open the terminal again, after the machine had no power."""
        with contextlib.suppress(OSError):
            self.terminal.close()
        self.terminal = Terminal(self.host, self._variables, self.folder)


class TypedMachines:
    """Machines of one person. They are not paired yet."""

    def __init__(self, lab: Lab, names: Sequence[str], without_torch: str = "") -> None:
        self.lab = lab
        # A short path: the local socket's name must fit into 107 bytes.
        self._directory = tempfile.TemporaryDirectory(prefix="by-j-", ignore_cleanup_errors=True)
        self.all = [
            TypedMachine(host, Path(self._directory.name), name, torch=name != without_torch)
            for host, name in zip(lab.hosts, names, strict=True)
        ]

    def __enter__(self) -> TypedMachines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in self.all:
            with contextlib.suppress(OSError):
                machine.terminal.close()
            machine.host.kill_all()
        self._directory.cleanup()

    def pair(self, owner: TypedMachine, joiners: Sequence[TypedMachine]) -> list[str]:
        """Let machines join one after the other; return what each of them prints."""
        pairing = owner.open(f"barnraise pair --machines {len(joiners)}")
        printed = []
        for number, joiner in enumerate(joiners, 1):
            which = "the other machine" if len(joiners) == 1 else f"machine {number} of {len(joiners)}"
            owner.until(pairing, rf"(?s){which} run:.*expires")
            printed.append(joiner.type(f"barnraise join {PAIRING_CODE.findall(pairing.output)[-1]}"))
        owner.ended(pairing, 0)
        return printed

    def until_online(self, machine: TypedMachine, count: int) -> None:
        """Wait until a machine sees that all of its cluster's machines, this many, are online."""
        deadline = time.monotonic() + PATIENCE_S
        while f"{count} of {count} machines" not in (status := machine.type("barnraise status")):
            if time.monotonic() > deadline:
                raise AssertionError(f"waited in vain until {count} machines are online:\n{status}")
            time.sleep(0.5)


def is_narrow(output: str) -> bool:
    """Tell whether every line fits the terminal."""
    return all(len(line) <= COLUMNS for line in output.splitlines())


def run_name(output: str) -> str:
    name = re.search(r"barnraise: run (\w+-\w+) ", output)
    assert name is not None, output
    return name[1]
