"""Real run of a few agents on this computer, in which a worker is killed and comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from barnraise.agent_client.cluster_requests import RenameRequest, RequestDone
from barnraise.history.log_file import logs_of, read_entries
from barnraise.history.merge import merge
from barnraise.history.view import RunView
from barnraise.history.view_builder import build_view
from benchmarks.agents.local import LocalAgents
from benchmarks.watch.session import row_of, steps_of

BATCH = 48
_PATIENCE_S = 300.0
# It learns to write Python's own manual, letter by letter: real text that each Python has.
_SCRIPT = """
import pydoc_data.topics
import barnraise
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Writer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = torch.nn.Embedding(128, 32)
        self.memory = torch.nn.GRU(32, 96, batch_first=True)
        self.guess = torch.nn.Linear(96, 128)

    def forward(self, letters):
        return self.guess(self.memory(self.letters(letters))[0])


torch.set_num_threads(1)
torch.manual_seed(0)
text = "".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
windows = torch.tensor(list(text)).unfold(0, 49, 16)[torch.randperm(len(text) // 16 - 3)]
windows = windows.repeat({steps} * {batch} // len(windows) + 1, 1)[: {steps} * {batch}]
run = barnraise.init()
model = Writer()
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
loader = DataLoader(TensorDataset(windows), batch_size={batch})
model, optimizer, batches = run.prepare(model, optimizer, loader)
for epoch in run.epochs(1):
    for batch in batches:
        for (letters,) in batch:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(letters[:, :-1]).transpose(1, 2), letters[:, 1:])
            loss.backward()
            run.log(loss=loss)
            optimizer.step()
"""


@dataclass(frozen=True)
class Scene:
    """Run that trains, after a death and a return. ``folder``: where commands are typed."""

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

    def wait_for_end(self) -> None:
        """Wait until the run has ended, and its record is complete."""
        self.until(lambda: row_of(self.agents, self.run).phase == "ended", "the run has ended")
        self.until(lambda: self.view().ended_at is not None and not self.view().missing, "all is copied")

    def until(self, truth: Callable[[], object], what: str) -> None:
        """Wait until a condition is true."""
        self.agents.until(truth, what, _PATIENCE_S)


@contextmanager
def run_with_death(folder: Path, names: Sequence[str], *, steps: int, kill_at: int) -> Iterator[Scene]:
    """Start the run, kill the worker of the last machine at a step, and yield when it trains again."""
    with LocalAgents(len(names)) as agents:
        agents.form()
        for place, name in enumerate(names):
            agents.ask(place, RenameRequest(name), RequestDone)
        scene = Scene(agents, _start(agents, folder, steps), folder)
        scene.wait_for_steps(kill_at)
        scene.until(lambda: len(row_of(agents, scene.run).machines) == len(names), "all machines train")
        os.kill(_worker(agents, len(names) - 1), signal.SIGKILL)
        scene.until(lambda: _has_returned(scene.view()), "the death and the return are in the record")
        yield scene


def _start(agents: LocalAgents, folder: Path, steps: int) -> str:
    project = folder / "project"
    project.mkdir()
    (project / "train.py").write_text(_SCRIPT.format(steps=steps, batch=BATCH))
    done = agents.type(0, "run", "--env", "agent", "--detach", "train.py", folder=project)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def _worker(agents: LocalAgents, place: int) -> int:
    """Return the process of a machine's worker: it runs the script in the directory of its agent."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if words[-1:] == ["train.py"] and Path(process.cwd()).is_relative_to(agents.state(place)):
                return int(process.pid)
    raise AssertionError("the machine has no worker")


def _has_returned(view: RunView) -> bool:
    kinds = [event.kind for event in view.events]
    return "died" in kinds and any(kind in kinds[kinds.index("died") :] for kind in ("recovered", "joined"))
