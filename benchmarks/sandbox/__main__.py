"""Measure what a sandbox costs: seconds until the script's first line, and the time of a step.

The same program runs alternately in the sandbox and without it. A step is a small training step of torch and
a message over a local socket, as between a worker and its communication process. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from barnraise.sandbox.choice import find_sandbox, sandboxed
from barnraise.sandbox.spec import SandboxSpec, python_roots

START = "import sys, time; sys.stdout.write(repr(time.time()))"
STEPS = """
import os, socket, sys, threading, time
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
near, far = socket.socketpair()
def echo():
    while data := far.recv(65536):
        far.sendall(data)
threading.Thread(target=echo, daemon=True).start()
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(128, 256)
shared = os.memfd_create("x")
os.ftruncate(shared, 1 << 20)
def step():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    os.pwrite(shared, b"x" * 65536, 0)
    near.sendall(b"x" * 4096)
    received = 0
    while received < 4096:
        received += len(near.recv(65536))
for _ in range(20):
    step()
times = []
for _ in range(int(sys.argv[1])):
    began = time.perf_counter()
    step()
    times.append(time.perf_counter() - began)
times.sort()
print(times[len(times) // 2])
"""


def main() -> int:
    """Print both costs and return 0 if they are within their limits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured")
    parser.add_argument("--steps", type=int, default=300, help="steps of each measurement")
    options = parser.parse_args()
    sandbox = find_sandbox()
    if not sandbox.is_possible:
        raise SystemExit(f"no sandbox is possible here: {sandbox.reason}")
    with tempfile.TemporaryDirectory(prefix="by-") as directory:
        folder = Path(directory, "folder")
        folder.mkdir()
        spec = SandboxSpec(
            root=str(Path(directory, "sandbox")),
            directory=str(folder),
            writable=(str(folder),),
            readable=python_roots(Path(sys.executable)),
            hidden=(str(Path.home()),),
        )

        def measure(code: str, *words: str, confined: bool) -> tuple[float, float]:
            """Return the number that a program printed, and when it was started."""
            command: tuple[str, ...] = (sys.executable, "-c", code, *words)
            environment = dict(os.environ)
            if confined:
                wrapped = sandboxed(sandbox, spec, command, os.environ, {})
                command, environment = wrapped.command, wrapped.environment
            began = time.time()
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
            if done.returncode:
                raise SystemExit(done.stderr)
            return float(done.stdout), began

        starts: dict[bool, list[float]] = {False: [], True: []}
        steps: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(options.rounds):
            for confined in (False, True):
                reached, began = measure(START, confined=confined)
                starts[confined].append(reached - began)
                steps[confined].append(measure(STEPS, str(options.steps), confined=confined)[0])
    # The least of several: other programs of the machine only ever add to it.
    start_s = min(starts[True]) - min(starts[False])
    step_share = min(steps[True]) / min(steps[False]) - 1.0
    spread = statistics.pstdev(steps[False]) / statistics.mean(steps[False])
    sys.stdout.write(f"start: {min(starts[False]):.3f} s without, {min(starts[True]):.3f} s in the sandbox\n")
    sys.stdout.write(
        f"step: {min(steps[False]) * 1e3:.3f} ms without, {min(steps[True]) * 1e3:.3f} ms in it\n"
    )
    figures = {"start_s": start_s, "step_share": step_share, "spread_without": spread}
    sys.stdout.write(json.dumps({name: round(value, 4) for name, value in figures.items()}) + "\n")
    return 0 if start_s <= 0.5 and step_share <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
