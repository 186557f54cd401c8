"""A child process of a command, under its own supervisor, which stops the child with the command."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import click

from barnraise.agent.runs.supervisor_client import SupervisorClient, read_log
from barnraise.agent.supervisor.messages import (
    QUIET,
    Event,
    LaunchRequest,
    SupervisorNote,
    WorkerExited,
    WorkerLaunch,
    WorkerLimits,
)
from barnraise.core.sanitize import OutputFilter, printable

LEFT = 130  # the exit code of a command that the person ended
LOOK_S = 0.1  # between two looks at what it has written
_GRACE_S = 8.0
_READ_BYTES = 1 << 20


def say(sentence: str) -> None:
    """Print a line of ours on stderr; it may quote a hub or another machine."""
    click.echo(f"barnraise: {printable(sentence)}", err=True)


class ChildProcess:
    """Supervised child process of a command.

    ``workspace``: directory of its output and of the supervisor's record. ``folder``: its working directory.
    """

    def __init__(self, log: Path) -> None:
        self.ended: WorkerExited | None = None
        self._log, self._shown = log, 0
        self._filter = OutputFilter()
        self._supervisor: SupervisorClient | None = None

    @classmethod
    async def start(
        cls,
        name: str,
        command: tuple[str, ...],
        *,
        workspace: Path,
        folder: Path,
        environment: Mapping[str, str],
        quiet: bool = False,
    ) -> ChildProcess:
        kept = cls(workspace / f"{name}.output")
        worker = WorkerLaunch(0, 0, command, str(folder), dict(environment), str(kept._log))
        limits = QUIET if quiet else WorkerLimits()
        kept._supervisor = await SupervisorClient.start(
            LaunchRequest(name, 0, (worker,), str(workspace), limits, grace_s=_GRACE_S), kept._hear
        )
        return kept

    def show(self) -> None:
        """Print the child's output since the last call; it may be a friend's script, so only colours pass."""
        part = read_log(self._log, self._shown, _READ_BYTES)
        self._shown = part.start + len(part.data)
        if part.data:
            sys.stdout.write(self._filter.feed(part.data))
            sys.stdout.flush()

    async def until_ended(self) -> None:
        """Wait until the child stops by itself, and print its output meanwhile."""
        while self.ended is None:
            self.show()
            await asyncio.sleep(LOOK_S)

    async def stop(self) -> None:
        if self._supervisor is not None:
            await self._supervisor.stop()
            await self._supervisor.wait()
        self.show()

    @property
    def code(self) -> int:
        """Return the exit code for the command: the child's own code if it has one."""
        if self.ended is None:
            return LEFT
        return self.ended.code if self.ended.code is not None else 1

    def how(self) -> str:
        ended = self.ended
        if ended is None or (ended.code is None and ended.signal is None):
            return "ended for an unknown reason"
        return (
            f"was killed by signal {ended.signal}" if ended.code is None else f"ended with code {ended.code}"
        )

    def _hear(self, event: Event) -> None:
        if isinstance(event, WorkerExited):
            self.ended = event
        elif isinstance(event, SupervisorNote):
            say(event.text)


def until_left(work: Coroutine[Any, Any, int]) -> int:
    """Run it; Ctrl-C and SIGTERM cancel it, and what it does then is its leaving."""

    async def main() -> int:
        task = asyncio.current_task()
        assert task is not None
        if sys.platform != "win32":
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(main())
    except (KeyboardInterrupt, asyncio.CancelledError):
        return LEFT
