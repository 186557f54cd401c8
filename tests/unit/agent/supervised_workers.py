"""A supervisor with real workers, its events, and whether its processes are still there."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from barnraise.agent.runs.supervisor_client import SupervisorClient, read_log
from barnraise.agent.supervisor.messages import (
    Event,
    LaunchRequest,
    SupervisorNote,
    WorkerExited,
    WorkerLaunch,
    WorkerStarted,
)

Kind = TypeVar("Kind")

# A child that left its parent, its group and its session, as daemons do; it writes its number to a file.
DAEMONISE = """
import os, sys, time
def daemonise(file):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(file + ".draft", "w") as out:
                out.write(str(os.getpid()))
            os.rename(file + ".draft", file)
            time.sleep(600)
        os._exit(0)
    while not os.path.exists(file):
        time.sleep(0.01)
"""


def worker(home: Path, program: str, rank: int = 0, **more: Any) -> WorkerLaunch:
    fields: dict[str, Any] = {
        "rank": rank,
        "local_rank": rank,
        "command": (sys.executable, "-c", program),
        "directory": str(home),
        "environment": {"PYTHONUNBUFFERED": "1"},
        "log": str(home / f"rank-{rank}.log"),
    }
    return WorkerLaunch(**{**fields, **more})


def launch(home: Path, *workers: WorkerLaunch, **more: Any) -> LaunchRequest:
    return LaunchRequest("run-1", 3, workers, str(home / "records"), **more)


class Supervised:
    """Collects what the supervisor says; every wait has a deadline."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = asyncio.Event()
        self.supervisor: SupervisorClient

    @classmethod
    async def start(cls, request: LaunchRequest, python: str = sys.executable) -> Supervised:
        group = cls()
        group.supervisor = await SupervisorClient.start(request, group._on_event, python)
        return group

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    def all(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, enough: Callable[[Supervised], object], deadline_s: float = 90.0) -> None:
        async with asyncio.timeout(deadline_s):
            while not enough(self):
                self._changed.clear()
                await self._changed.wait()

    async def wait_exit(self, deadline_s: float = 90.0) -> None:
        async with asyncio.timeout(deadline_s):
            await self.supervisor.wait()

    def pid(self, rank: int) -> int:
        return next(event.pid for event in self.all(WorkerStarted) if event.rank == rank)

    def exited(self, rank: int) -> WorkerExited:
        (exit_event,) = [event for event in self.all(WorkerExited) if event.rank == rank]
        return exit_event

    def notes(self) -> str:
        return "\n".join(event.text for event in self.all(SupervisorNote))


async def wait_for_output(log: Path, words: bytes, deadline_s: float = 90.0) -> None:
    """Until a worker has printed these words."""
    async with asyncio.timeout(deadline_s):
        while words not in read_log(log, 0, 1 << 20).data:
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_gone_within(pid: int, deadline_s: float) -> bool:
    deadline = time.monotonic() + deadline_s
    while is_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
