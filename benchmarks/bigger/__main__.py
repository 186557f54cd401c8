"""Fine-tuning of a Llama that fits on none of three lab hosts, whose memory has a hard limit; one host dies.

    python -m benchmarks.bigger --quick                       a model of 1.2 billion parameters
    python -m benchmarks.bigger --width 256 --layers 6 --limit-mb 1500      any other size

Each worker is in a memory control group (version 1 of Linux, as root). A worker is killed in the middle of
the run, and comes back. One process without a limit trains the same steps.

The last line is one JSON object of figures:

- ``peak_memory_over_limit``: peak of a worker and of the processes that it started, over its limit; the
  largest of the hosts.
- ``model_over_limit``: bytes of the weights over the largest limit. Above 1, no host could hold the model.
- ``loss_gap``: largest difference of a step's loss from the same step alone.
- ``samples_lost``, ``samples_doubled``: of the steps that a worker has not committed, or more than once.
- ``kill_to_commit_s``: from the kill to the next committed step.

What is not measured yet: other ways to train, and how near the step comes to what the links allow.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine, worker_pids
from benchmarks.finetune.__main__ import MemoryWatch
from benchmarks.report import environment_line, last_line
from lab import Host, Lab, LabProcess

HOSTS, RATE = 3, "1gbit"
SCRIPT = "bigger.py"
SHARES = (1.0, 0.8, 1.2)  # of the given limit: the hosts are unequal
_GROUPS = Path("/sys/fs/cgroup/memory")
_RUN_S = 3000.0
_KILL_AFTER = 3  # committed steps


class Row(NamedTuple):
    """A committed step of one worker."""

    step: int
    world: int
    loss: float
    seconds: float
    at: float


def main() -> int:
    options = _options()
    print(environment_line(), flush=True)
    with tempfile.TemporaryDirectory(prefix="by-big-") as name:
        directory = Path(name)
        size = write_base(directory / "base", options.width, options.layers, options.words)
        print(f"the weights have {size / 1e6:.0f} MB", flush=True)
        limits = [round(share * options.limit_mb * (1 << 20)) for share in SHARES]
        with Lab(hosts=HOSTS, rate=RATE) as lab, Machines(lab.hosts) as machines, _groups(limits) as groups:
            figures = measure(machines, directory, groups, limits, options)
    last_line(
        {**figures, "model_over_limit": size / max(limits), "model_bytes": size, "hosts": HOSTS, "rate": RATE}
    )
    return 0


def write_base(folder: Path, width: int, layers: int, words: int) -> int:
    """Write the files of a Llama with random weights, a tensor at a time, and return their bytes."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from barnraise.training.pipeline.empty_weights import empty_weights

    config = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 256),
        max_position_embeddings=2048,
    )
    with empty_weights():
        model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    folder.mkdir()
    config.save_pretrained(folder)
    source, total = torch.Generator().manual_seed(0), 0
    for number, (name, parameter) in enumerate(model.named_parameters()):
        value = torch.empty(parameter.shape, dtype=torch.float32)
        if parameter.dim() == 1:
            value.fill_(1.0)
        else:
            value.normal_(0.0, 0.02, generator=source)
        save_file({name: value}, folder / f"model-{number:05d}.safetensors")
        total += value.numel() * value.element_size()
    return total


def measure(
    machines: Machines, directory: Path, groups: list[Path], limits: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    """Train alone, then split with a kill, and return the figures."""
    folder, marks, alone = directory / "project", directory / "marks", directory / "alone"
    for path in (folder, marks, alone):
        path.mkdir()
    (folder / SCRIPT).write_text((REPOSITORY / "benchmarks" / "bigger" / "program.py").read_text())
    given = {
        "BASE": str(directory / "base"),
        "STEPS": str(options.steps),
        "BATCH": str(options.batch),
        "LENGTH": str(options.length),
        "OMP_NUM_THREADS": "1",
    }
    host = machines.hosts[0]
    variables = machines.environment(0) | given | {"MARKS": str(alone)}
    finish(host.start([sys.executable, SCRIPT], env=variables, cwd=folder))
    expected = {row.step: row for row in read_rows(alone / "steps-alone")}
    print(f"alone: {expected[1].loss:.4f} to {expected[options.steps].loss:.4f}", flush=True)
    machines.own = [{"GROUP": str(group)} for group in groups]
    machines.form()
    (marks / "hold").touch()
    words = [
        f"--set={name}={value}" for name, value in {**given, "MARKS": str(marks), "PAUSE_S": "1"}.items()
    ]
    running = CommandLine(machines).start(0, "run", "--all", *words, SCRIPT, folder=folder)
    with MemoryWatch([_workers_of(each) for each in machines.hosts]) as watch:
        _wait(machines, running, lambda: _newest(marks) >= _KILL_AFTER, "steps are committed")
        node, pid = (marks / "pids").read_text().split("\n")[HOSTS - 1].split()
        killed_at, step = time.time(), _newest(marks)
        os.kill(int(pid), signal.SIGKILL)
        print(f"killed the worker of {node[:8]} after step {step}", flush=True)
        _wait(machines, running, lambda: _newest(marks) > step + 1, "steps are committed again")
        (marks / "hold").unlink()
        finish(running)
    rows = [row for path in marks.glob("steps-*") for row in read_rows(path)]
    by_worker = [read_rows(path) for path in marks.glob("steps-*")]
    doubled = sum(len(each) - len({row.step for row in each}) for each in by_worker)
    after = [row.at for row in rows if row.at > killed_at and row.step > step]
    return {
        "peak_memory_over_limit": max(peak / limit for peak, limit in zip(watch.peaks, limits, strict=True)),
        "loss_gap": max(abs(row.loss - expected[row.step].loss) for row in rows),
        "samples_lost": options.batch * (options.steps - len({row.step for row in rows})),
        "samples_doubled": options.batch * doubled,
        "kill_to_commit_s": min(after) - killed_at,
        "step_s": sorted(row.seconds for row in rows)[len(rows) // 2],
        "step_alone_s": sorted(row.seconds for row in expected.values())[len(expected) // 2],
        "limits_bytes": limits,
        "peaks_bytes": watch.peaks,
    }


def read_rows(path: Path) -> list[Row]:
    """Return the committed steps in a file of a worker."""
    return [Row(*json.loads(line)) for line in path.read_text().splitlines()]


def finish(process: LabProcess) -> str:
    """Return the output of a process that ends well; raise SystemExit with it if it does not."""
    if process.wait(_RUN_S) != 0:
        raise SystemExit(f"{' '.join(process.argv)} failed:\n{process.output()}")
    return process.output()


@contextmanager
def _groups(limits: list[int]) -> Iterator[list[Path]]:
    """Make a memory control group for each host, and remove them at the end."""
    groups = [_GROUPS / f"barnraise-bigger-{os.getpid()}-{place}" for place in range(len(limits))]
    try:
        for group, limit in zip(groups, limits, strict=True):
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(limit))
        yield groups
    finally:
        for group in groups:
            if group.exists():
                group.rmdir()


def _wait(machines: Machines, running: LabProcess, truth: Callable[[], bool], what: str) -> None:
    machines.until(lambda: running.poll() is not None or truth(), _RUN_S, what)
    if running.poll() is not None:
        raise SystemExit(f"the run ended before {what}:\n{running.output()}")


def _newest(marks: Path) -> int:
    return max((row.step for path in marks.glob("steps-*") for row in read_rows(path)), default=0)


def _workers_of(host: Host) -> Callable[[], list[int]]:
    return lambda: worker_pids(host, SCRIPT)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--words", type=int, default=32000)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--limit-mb", type=int, default=3600, help="memory of a host, about")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--batch", type=int, default=6)
    options = parser.parse_args()
    options.steps = options.steps or (8 if options.quick else 20)
    return options


if __name__ == "__main__":
    sys.exit(main())
