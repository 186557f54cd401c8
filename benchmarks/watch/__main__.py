"""Measure what ``barnraise watch`` costs while a session trains on two machines of this computer.

    python -m benchmarks.watch --seconds 60

It counts the processor time of the screen and of the agent that it asks, and the bytes that reach the
terminal. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

import psutil

from benchmarks.agents.local import LocalAgents
from benchmarks.report import environment_line
from benchmarks.watch.session import start_session, steps_of

_SETTLED_S = 10.0
_STEP_S = 0.5
_MANY = 1_000_000


class Terminal:
    """Terminal without a person, in which the screen of a run is open."""

    def __init__(self, agents: LocalAgents, run: str, columns: int, rows: int) -> None:
        self.bytes = 0
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "barnraise.cli.main", "watch", run],
            env={**agents.environment(0), "TERM": "xterm-256color"},
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
        )
        os.close(side)
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        while True:
            try:
                data = os.read(self._main, 65536)
            except OSError:
                return
            if not data:
                return
            self.bytes += len(data)

    def close(self) -> int:
        """Send the key q, and return the exit code."""
        os.write(self._main, b"q")
        return self.process.wait(30.0)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--rows", type=int, default=24)
    options = parser.parse_args(arguments)
    print(environment_line())
    with tempfile.TemporaryDirectory() as folder, LocalAgents(2) as agents:
        agents.form()
        run = start_session(agents, Path(folder), pause_s=_STEP_S, steps=_MANY)
        agent = agents.agents[0]
        assert agent is not None
        agent_alone = _agent_share(agent.pid, options.seconds / 2)
        terminal = Terminal(agents, run, options.columns, options.rows)
        time.sleep(_SETTLED_S)
        start, screen, agent_s, sent = (
            time.monotonic(),
            _cpu_s(terminal.process.pid),
            _cpu_s(agent.pid),
            terminal.bytes,
        )
        first = steps_of(agents, run)
        time.sleep(options.seconds)
        minutes = (time.monotonic() - start) / 60
        figures = {
            "steps": steps_of(agents, run) - first,
            "screen_cpu_s_per_minute": round((_cpu_s(terminal.process.pid) - screen) / minutes, 2),
            "agent_cpu_s_per_minute": round((_cpu_s(agent.pid) - agent_s) / minutes, 2),
            "agent_alone_cpu_s_per_minute": round(agent_alone, 2),
            "terminal_bytes_per_s": round((terminal.bytes - sent) / minutes / 60),
        }
        code = terminal.close()
    print(json.dumps({**figures, "exit_code": code}))
    return code


def _agent_share(pid: int, seconds: float) -> float:
    """Return the processor seconds of the agent in a minute without the screen."""
    before, start = _cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (_cpu_s(pid) - before) / (time.monotonic() - start) * 60


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
