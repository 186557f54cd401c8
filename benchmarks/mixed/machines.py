"""Machines of any system in the lab, used through the command line as a person uses them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.agents.machines import REPOSITORY, until
from benchmarks.agents.runs import worker_pids
from lab import LINUX, WINDOWS, Host, LabProcess

_KILL_ON_WINDOWS = """
import os, psutil, sys
from barnraise.core.flow.termination import WINDOWS_KILL_CODE
for process in psutil.process_iter():
    try:
        if process.cmdline()[-1:] == sys.argv[1:] and process.pid != os.getpid():
            os.kill(process.pid, WINDOWS_KILL_CODE)
            print("killed")
    except psutil.Error:
        pass
"""
PATIENCE_S = 600.0  # an emulated machine imports torch in minutes


class MixedMachine:
    """A host, its name in the cluster, and its state directory."""

    def __init__(self, host: Host, room: Path, name: str) -> None:
        self.host, self.name = host, name
        self.host.host_name = name
        state = room / name
        state.mkdir(mode=0o700)
        is_windows = host.system is WINDOWS
        self._variables = {
            "BARNRAISE_STATE_DIRECTORY": r"C:\users\root\barnraise" if is_windows else str(state),
            "OMP_NUM_THREADS": "1",
        }
        if host.system is LINUX:
            self._variables["PYTHONPATH"] = f"{REPOSITORY / 'src'}:{REPOSITORY}"
        self.agent: LabProcess | None = None

    def start_agent(self) -> None:
        """Start its agent, as ``barnraise up`` does."""
        self.agent = self.host.start([self.host.python, "-P", "-m", "barnraise.agent"], env=self._variables)

    @property
    def agent_log(self) -> str:
        """Return what its agent has printed."""
        return "" if self.agent is None else self.agent.output()

    def _command(self, *words: str) -> list[str]:
        return [self.host.python, "-m", "barnraise.cli.main", *words]

    def start(self, *words: str, folder: Path | None = None) -> LabProcess:
        """Start a command in the background; its output is kept."""
        return self.host.start(self._command(*words), env=self._variables, cwd=folder)

    def type(self, *words: str, folder: Path | None = None) -> str:
        """Type a command and return what it prints; raise AssertionError unless it succeeds."""
        command = self.start(*words, folder=folder)
        try:
            code = str(command.wait(PATIENCE_S))
        except subprocess.TimeoutExpired:
            code = f"did not end within {PATIENCE_S:g} s"
            command.kill()
        assert code == "0", f"on {self.name}, barnraise {' '.join(words)}: {code}\n{command.output()}"
        return command.output()

    def try_to_type(self, *words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Type a command, and return how it ended."""
        command = self._command(*words)
        return self.host.run(command, env=self._variables, cwd=folder, timeout=PATIENCE_S, check=False)

    def python(self, script: str, folder: Path) -> None:
        """Run a script without Barnraise's command; raise AssertionError unless it succeeds."""
        command = [self.host.python, script]
        done = self.host.run(command, env=self._variables, cwd=folder, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def answers(self) -> bool:
        """Tell whether its agent answers."""
        return self.try_to_type("status").returncode in (0, 3)

    def kill_workers(self, script: str) -> int:
        """Kill its workers at once; return how many there were."""
        if self.host.system is WINDOWS:
            # Through Windows, whose exit code says that it was a kill.
            killed = self.host.run([self.host.python, "-c", _KILL_ON_WINDOWS, script], timeout=PATIENCE_S)
            return killed.stdout.count("killed")
        pids = worker_pids(self.host, script)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return len(pids)


class MixedCommandLine:
    """``barnraise ...`` typed on machines of any system."""

    def __init__(self, machines: Sequence[MixedMachine]) -> None:
        self.machines = machines

    def start(self, place: int, *words: str, folder: Path | None = None) -> LabProcess:
        """Start a command in the background; its output is kept."""
        return self.machines[place].start(*words, folder=folder)

    def until(self, truth: Callable[[], bool], seconds: float, what: str) -> float:
        """Wait until the condition is true and return the seconds that this took."""
        return until(truth, seconds, what)
