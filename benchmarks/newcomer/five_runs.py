"""Recordings of five runs: can a reader tell from each what happened? (root).

The five are a success, the death of a machine, an error on one machine, and an error on all machines. The
last one is a script that was not written for several machines. Each is typed at a terminal of 80 columns,
and written as a text with times and for asciinema.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import report
from benchmarks.agents.machines import Machines
from benchmarks.newcomer.recording import cast, text_with_times
from lab import Lab
from lab.terminal import Terminal

NAMES = ("mac", "pc", "nas")
_RUN_S = 300.0
_ZERO_GRAD = "            optimizer.zero_grad()\n"
_ERROR = """
            if os.environ["RANK"] == "1" and run.step >= 8 and not os.path.exists("{mark}"):
                open("{mark}", "w").close()
                raise ValueError("no such label: 7")
"""
PLAIN = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(512, 4)
y = (x.sum(1) > 0).long()
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
for epoch in range(3):
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
torch.save(model.state_dict(), "model.pt")
"""


def scripts(folder: Path) -> dict[str, str]:
    """Return the script of each run, by what happens in it."""
    example = (report.REPOSITORY / "examples" / "train.py").read_text(encoding="utf-8")
    short = example.replace("run.epochs(16)", "run.epochs(6)")
    error = _ERROR.format(mark=folder / "raised")
    return {
        "death": short,
        "plain": PLAIN,
        "success": short,
        "error on all": short.replace("nn.Linear(64, 2)", "nn.Linear(32, 2)"),
        "error on one": "import os\n" + short.replace(_ZERO_GRAD, _ZERO_GRAD + error, 1),
    }


def record(machines: Machines, folder: Path, script: str, meanwhile: Callable[[], None] | None) -> Terminal:
    """Type ``barnraise run train.py`` in a folder, and wait for its end; ``meanwhile``: after epoch 1."""
    folder.mkdir()
    (folder / "train.py").write_text(script, encoding="utf-8")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with Terminal(machines.hosts[0], {**machines.environment(0), "PATH": path}, folder) as terminal:
        command = terminal.type("barnraise run train.py")
        if meanwhile is not None:
            terminal.until(command, "epoch 1 ", _RUN_S)
            meanwhile()
        terminal.wait(command, _RUN_S)
        terminal.run("echo $?")
    return terminal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--recordings", type=Path, default=Path("five-runs"), help="folder of the recordings")
    target: Path = parser.parse_args().recordings
    target.mkdir(parents=True, exist_ok=True)
    with Lab(hosts=3) as lab, Machines(lab.hosts) as machines, tempfile.TemporaryDirectory() as directory:
        for place, name in enumerate(NAMES):
            lab.hosts[place].host_name = name
            machines.start(place)
            machines.rename(place, name)
        for place in (1, 2):
            machines.pair(0, place)
        machines.until(lambda: machines.agree(range(3)), 60.0, "all agree")
        runs = scripts(Path(directory))
        for number, kind in enumerate(sorted(runs, key=lambda kind: kind == "death"), 1):  # last
            meanwhile = machines.hosts[2].kill_all if kind == "death" else None
            terminal = record(machines, Path(directory) / f"spiral{number}", runs[kind], meanwhile)
            text = text_with_times(terminal.printed, terminal.begin_s)
            (target / f"{number}.txt").write_text(text, encoding="utf-8")
            (target / f"{number}.cast").write_text(cast(terminal, str(number)), encoding="utf-8")
            print(f"{number}: {kind}", flush=True)
        machines.agents[2] = None
    return 0


if __name__ == "__main__":
    sys.exit(main())
