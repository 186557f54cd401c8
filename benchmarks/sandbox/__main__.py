"""Measure what a sandbox costs: seconds until the script's first line, and the share of a step's time.

Two processes run the same steps in turn, one in the sandbox and one without, in short blocks. So both meet
the same load of the machine. A step trains a small model of torch, writes to shared memory and sends a
message over a local socket. A worker and its communication process do the same. Two processes without a
sandbox are compared in the same way: ``step_noise`` says how far the machine lets equal processes differ. The
last line is JSON.
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
from benchmarks.report import environment_line, table

_MAX_START_S = 0.5
_MAX_STEP_SHARE = 0.01
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
for line in sys.stdin:
    times = []
    for _ in range(int(line)):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    times.sort()
    print(times[len(times) // 2], flush=True)
"""


class Bench:
    """Programs in a sandbox and without one, in the same folder."""

    def __init__(self, directory: Path) -> None:
        self._sandbox = find_sandbox()
        if not self._sandbox.is_possible:
            raise SystemExit(f"no sandbox is possible here: {self._sandbox.reason}")
        folder = directory / "folder"
        folder.mkdir()
        self._spec = SandboxSpec(
            root=str(directory / "sandbox"),
            directory=str(folder),
            writable=(str(folder),),
            readable=python_roots(Path(sys.executable)),
            hidden=(str(Path.home()),),
        )

    def start(self, code: str, *, confined: bool) -> subprocess.Popen[str]:
        """Start a program that can be talked to."""
        command: tuple[str, ...] = (sys.executable, "-c", code)
        environment = dict(os.environ)
        if confined:
            wrapped = sandboxed(self._sandbox, self._spec, command, os.environ, {})
            command, environment = wrapped.command, wrapped.environment
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start_s(self, *, confined: bool) -> float:
        """Return the seconds until the first line of a program."""
        began = time.time()
        with self.start(START, confined=confined) as process:
            return float(process.communicate(timeout=120)[0]) - began

    def step_times(self, blocks: int, steps: int, *, confined: bool) -> list[tuple[float, float]]:
        """Return the median step of each block, without a sandbox and, if ``confined``, in it."""
        with self.start(STEPS, confined=False) as plain, self.start(STEPS, confined=confined) as boxed:
            _block(plain, steps), _block(boxed, steps)  # the first steps are slower
            pairs = []
            for number in range(blocks):
                if number % 2:
                    pairs.append((_block(plain, steps), _block(boxed, steps)))
                else:
                    in_box = _block(boxed, steps)
                    pairs.append((_block(plain, steps), in_box))
            for process in (plain, boxed):
                assert process.stdin is not None
                process.stdin.close()
            return pairs


def _block(process: subprocess.Popen[str], steps: int) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> int:
    """Print both costs and return 0 if they are within their limits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="about a minute: fewer blocks of steps")
    parser.add_argument("--starts", type=int, default=10, help="starts of each kind")
    parser.add_argument("--blocks", type=int, help="blocks of steps of each kind")
    parser.add_argument("--steps", type=int, default=15, help="steps of a block")
    options = parser.parse_args()
    blocks = options.blocks or (200 if options.quick else 800)
    with tempfile.TemporaryDirectory(prefix="by-") as directory:
        bench = Bench(Path(directory))
        starts = [
            (bench.start_s(confined=False), bench.start_s(confined=True)) for _ in range(options.starts)
        ]
        steps = bench.step_times(blocks, options.steps, confined=True)
        equal = bench.step_times(blocks, options.steps, confined=False)
    start_s = statistics.median(boxed - plain for plain, boxed in starts)
    step_share = statistics.median(boxed / plain for plain, boxed in steps) - 1.0
    rows = [
        ["start, s", *(statistics.median(pair[side] for pair in starts) for side in (0, 1))],
        ["step, ms", *(statistics.median(pair[side] for pair in steps) * 1e3 for side in (0, 1))],
    ]
    noise = statistics.median(second / first for first, second in equal) - 1.0
    figures = {"start_s": start_s, "step_share": step_share, "step_noise": noise}
    figures = {name: round(value, 4) for name, value in figures.items()}
    heading = ("median", "without", "sandbox")
    sys.stdout.write(f"{environment_line()}\n{table(heading, rows)}\n{json.dumps(figures)}\n")
    return 0 if start_s <= _MAX_START_S and step_share <= _MAX_STEP_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
