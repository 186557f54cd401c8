"""Actions of a person on the screen: stop the run, pause a machine, read output. Calls wait for answers."""

from __future__ import annotations

from typing import Protocol

from barnraise.agent_client.cluster_requests import RequestDone
from barnraise.agent_client.log_tail import LogTail
from barnraise.agent_client.run_requests import StopRunRequest, WatchRequest, WatchResponse
from barnraise.cli.agent_call import ask
from barnraise.cli.machine.limits import ask_pause
from barnraise.core.sanitize import coloured

_LINE_WAIT_S = 1.0


class MachineLog(Protocol):
    """Output of the workers of one machine."""

    def read(self) -> list[str]:
        """Return the lines that are new; wait a moment for them."""
        ...


class Actions(Protocol):
    """Requests that the screen can make; each returns a sentence about what it did."""

    def stop(self) -> str: ...

    def set_pause(self, machine: str, *, paused: bool) -> str: ...

    def log_of(self, machine: str) -> MachineLog: ...


class AgentActions:
    """Requests to this machine's agent about one run."""

    def __init__(self, run: str) -> None:
        self._run = run

    def stop(self) -> str:
        """Stop the run on every machine."""
        return ask(StopRunRequest(self._run), RequestDone, offer_start=False).sentence

    def set_pause(self, machine: str, *, paused: bool) -> str:
        """Pause a machine of the cluster, or let runs use it again."""
        return ask_pause(machine, paused=paused).sentence

    def log_of(self, machine: str) -> MachineLog:
        """Return the output of the workers that this machine has or had."""
        return AgentMachineLog(self._run, machine)


class AgentMachineLog:
    """Output of the workers of one machine, asked of this machine's agent."""

    def __init__(self, run: str, machine: str) -> None:
        self._run, self._machine = run, machine
        self._tail = LogTail()
        self._numbers: list[int] | None = None

    def read(self) -> list[str]:
        """Return the lines that are new; wait a second for them. Lines of the second worker on name it."""
        starts = dict.fromkeys(self._numbers or (), 0)
        question = WatchRequest(
            run=self._run,
            version=0 if self._numbers is None else 1 << 40,
            follow=self._tail.wanted(starts),
            live=True,
            wait_s=0.0 if self._numbers is None else _LINE_WAIT_S,
        )
        response = ask(question, WatchResponse, offer_start=False)
        workers = [worker for worker in (*response.past, *response.workers) if worker.name == self._machine]
        self._numbers = [worker.number for worker in workers]
        first = self._numbers[0] if self._numbers else 0
        lines = [
            coloured(text if number == first else f"worker {number}: {text}")
            for number, text in self._tail.heard(response)
        ]
        lines += [f"{self._machine} does not answer; the output is there" for _ in self._tail.missing()[:1]]
        return lines
