"""Session of a few machines of this computer that trains until it is told to end."""

from __future__ import annotations

from pathlib import Path

from barnraise.agent_client.run_requests import RunRow, WatchRequest, WatchResponse
from benchmarks.agents.local import LocalAgents

SCRIPT = """
import sys, time
from pathlib import Path
marks, pause_s, steps = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
import os, torch, barnraise
(marks / f"pid-{os.getpid()}").write_text(os.environ["BARNRAISE_NODE"])
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
run = barnraise.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
data = TensorDataset(torch.randn(120, 8), torch.randn(120, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
model, optimizer, batches = run.prepare(model, optimizer, DataLoader(data, batch_size=12))
for epoch in run.epochs(steps // 10):
    for batch in batches:
        for x, y in batch:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            run.log(loss=loss)
            optimizer.step()
        if not (marks / "fast").exists():
            time.sleep(pause_s)
"""


def start_session(agents: LocalAgents, folder: Path, *, pause_s: float, steps: int) -> str:
    """Start the session on all agents, wait for its first steps, and return the name of the run."""
    project, marks = folder / "project", folder / "marks"
    project.mkdir()
    marks.mkdir()
    (project / "train.py").write_text(SCRIPT)
    words = ("run", "--env", "agent", "--detach", "train.py", str(marks), str(pause_s), str(steps))
    done = agents.type(0, *words, folder=project)
    assert done.returncode == 0, done.stderr
    run = done.stdout.strip().splitlines()[-1]
    agents.until(lambda: steps_of(agents, run) > 2, "the session trains", 300.0)
    return run


def row_of(agents: LocalAgents, run: str) -> RunRow:
    """Return the row of a run, as the first agent knows it."""
    return agents.ask(0, WatchRequest(run=run, wait_s=0), WatchResponse).row


def steps_of(agents: LocalAgents, run: str) -> int:
    """Return the committed steps of a run."""
    progress = row_of(agents, run).progress
    return progress.step if progress is not None else 0
