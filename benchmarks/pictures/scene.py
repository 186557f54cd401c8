"""Real run of a few agents on this computer, in which a worker is killed and comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from barnraise.agent_client.cluster_requests import RenameRequest, RequestDone
from barnraise.history.log_file import logs_of, read_entries
from barnraise.history.merge import merge
from barnraise.history.view import RunView
from barnraise.history.view_builder import build_view
from benchmarks.agents.local import LocalAgents
from benchmarks.watch.session import row_of, start_session, steps_of

_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Scene:
    """Run that trains, after a death and a return. ``folder``: with the marks of its workers."""

    agents: LocalAgents
    run: str
    folder: Path

    def view(self) -> RunView:
        """Return what the first machine's logs tell about the run."""
        paths = logs_of(self.agents.state(0), self.run).values()
        return build_view(merge(read_entries(path) for path in paths), run=self.run)

    def type(self, *words: str) -> str:
        """Run a command on the first machine, and return what it printed."""
        done = self.agents.type(0, *words, folder=self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait_for_steps(self, steps: int) -> None:
        """Wait until this number of steps is committed."""
        self.until(lambda: steps_of(self.agents, self.run) >= steps, f"step {steps}")

    def finish(self) -> None:
        """Let the run end, and wait for its end in the record."""
        (self.folder / "marks" / "fast").touch()
        self.until(lambda: row_of(self.agents, self.run).phase == "ended", "the run has ended")
        self.until(lambda: self.view().ended_at is not None and not self.view().missing, "all is copied")

    def until(self, truth: Callable[[], object], what: str) -> None:
        """Wait until a condition is true."""
        self.agents.until(truth, what, _PATIENCE_S)


@contextmanager
def run_with_death(
    folder: Path, names: Sequence[str], *, steps: int, pause_s: float, kill_at: int
) -> Iterator[Scene]:
    """Start the run, kill the worker of the last machine at a step, and yield when it trains again."""
    with LocalAgents(len(names)) as agents:
        agents.form()
        for place, name in enumerate(names):
            agents.ask(place, RenameRequest(name), RequestDone)
        scene = Scene(agents, start_session(agents, folder, pause_s=pause_s, steps=steps), folder)
        scene.until(lambda: len(row_of(agents, scene.run).machines) == len(names), "all machines train")
        scene.wait_for_steps(kill_at)
        os.kill(_workers(folder)[-1], signal.SIGKILL)
        scene.until(lambda: _has_returned(scene.view()), "the death and the return are in the record")
        yield scene


def _workers(folder: Path) -> list[int]:
    """Return the processes of the workers that are alive, by machine; each wrote a mark."""
    alive = []
    for mark in (folder / "marks").glob("pid-*"):
        pid = int(mark.name.removeprefix("pid-"))
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            alive.append((mark.read_text(), pid))
    return [pid for _, pid in sorted(alive)]


def _has_returned(view: RunView) -> bool:
    kinds = [event.kind for event in view.events]
    return "died" in kinds and any(kind in kinds[kinds.index("died") :] for kind in ("recovered", "joined"))
