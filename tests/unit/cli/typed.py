"""Machines at which commands are typed: each has a state directory and an environment of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.hub.process import free_port
from tests.unit.lone_agent import unsettled

_PATIENCE_S = 120.0


class Machine:
    """A machine of its own as far as Barnraise can tell. The path of its room must be short."""

    def __init__(self, room: Path, name: str, **variables: str) -> None:
        self.name = name
        self.room = room / name
        self.state = self.room / "state"
        self.room.mkdir()
        self.port = free_port()
        (self.room / "config.toml").touch()
        self.environment = unsettled(
            BARNRAISE_CONFIG=str(self.room / "config.toml"),
            BARNRAISE_STATE_DIRECTORY=str(self.state),
            BARNRAISE_NETWORK_PORT=str(self.port),
            BARNRAISE_NETWORK_ADDRESSES="127.0.0.1",
            **variables,
        )

    def type(self, *words: str, code: int = 0, patience_s: float = _PATIENCE_S) -> str:
        """Type a command, wait for its end, see that it ended with this code; and give all that it said."""
        done = subprocess.run(
            [sys.executable, "-m", "barnraise.cli.main", *words],
            cwd=self.room,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience_s,
        )
        assert done.returncode == code, f"{words} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    @contextmanager
    def typing(self, *words: str) -> Iterator[Typed]:
        """Type a command that stays; Ctrl-C ends it."""
        typed = Typed(self, words)
        try:
            yield typed
        finally:
            typed.end()


class Typed:
    """A command that runs."""

    def __init__(self, machine: Machine, words: tuple[str, ...]) -> None:
        self.words = words
        self._file = machine.room / f"{words[0]}-{time.monotonic_ns()}.output"
        with self._file.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "barnraise.cli.main", *words],
                cwd=machine.room,
                env=machine.environment | {"PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def output(self) -> str:
        return self._file.read_text(errors="replace")

    def until(self, truth: Callable[[], bool], what: str) -> None:
        """Wait while the command runs."""
        deadline = time.monotonic() + _PATIENCE_S
        while not truth():
            assert self._process.poll() is None, f"{self.words} ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"waited in vain for {what}:\n{self.output}"
            time.sleep(0.1)

    def ended(self) -> int:
        """Wait for its end, and give its exit code."""
        return self._process.wait(_PATIENCE_S)

    def end(self) -> int:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT if os.name != "nt" else signal.SIGTERM)
        try:
            return self._process.wait(90)
        finally:
            self._process.kill()
            print(f"$ {' '.join(self.words)}\n{self.output[-3000:]}")
