"""Timed operations inside a rank, always alternating between the groups that are compared.

All times are CLOCK_MONOTONIC nanoseconds, which every process of one machine shares; the driver puts
the ranks' times together. An operation lasts from the last rank's call to the last rank's end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

Groups = Mapping[str, Any]
Times = dict[str, list[list[int]]]
COMM_PROCESS = "barnraise.collectives.comm_process"
LISTENER = "barnraise.transport.listener.listener"


def comm_process_pids() -> list[int]:
    """Return the communication processes that belong to this process."""
    pids = []
    for child in psutil.Process().children(recursive=True):
        try:
            if any(COMM_PROCESS in word for word in child.cmdline()):
                pids.append(child.pid)
        except psutil.Error:
            continue
    return pids


def listener_pids() -> list[int]:
    """Return the listener of this host, which is one network namespace."""
    pids = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            is_listener = LISTENER in (process.info["cmdline"] or ())
            if is_listener and os.path.samefile(f"/proc/{process.pid}/ns/net", "/proc/self/ns/net"):
                pids.append(process.pid)
        except OSError:
            continue
    return pids


class CpuMeter:
    """CPU nanoseconds of this process and its communication processes together."""

    def __init__(self) -> None:
        self._comm_pids = comm_process_pids()

    def read(self) -> int:
        return time.process_time_ns() + sum(_cpu_of(pid) for pid in self._comm_pids)


def _cpu_of(pid: int) -> int:
    total = 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            total += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
    except (OSError, ValueError):
        return total
    return total


def _turns(names: Sequence[str], turn: int) -> Sequence[str]:
    """Rotate the order every round, so that no contender profits from its place."""
    shift = turn % len(names)
    return [*names[shift:], *names[:shift]]


def _strategy_counts() -> dict[str, float]:
    """Count the all-reduces of each strategy in this process, by our own metrics."""
    from barnraise.core import metrics

    return {
        sample.labels[1]: sample.value
        for sample in metrics.registry.samples()
        if sample.name == "barnraise_collective_duration_seconds_count" and sample.labels[0] == "all_reduce"
    }


class Observed:
    """Strategy that each group really used, observed once."""

    def __init__(self) -> None:
        self.used: dict[str, str] = {}

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        if name in self.used:
            yield
            return
        before = _strategy_counts()
        yield
        rose = [key for key, count in _strategy_counts().items() if count > before.get(key, 0.0)]
        self.used[name] = rose[0] if rose else ""


def all_reduce(
    groups: Groups, names: Sequence[str], control: str, size: int, rounds: int, warmup: int = 2
) -> dict[str, Any]:
    """Time blocking all-reduces of ``size`` bytes: start, end and CPU time of each."""
    tensor = torch.empty(size // 4, dtype=torch.float32)
    meter = CpuMeter()
    times: Times = {name: [] for name in names}
    wrong, observed = 0, Observed()
    for turn in range(-warmup, rounds):
        for name in _turns(names, turn):
            tensor.fill_(1.0)
            dist.barrier(group=groups[control])
            with observed.watch(name):
                cpu = meter.read()
                start = time.monotonic_ns()
                dist.all_reduce(tensor, group=groups[name])
                end = time.monotonic_ns()
                cpu = meter.read() - cpu
            if turn >= 0:
                times[name].append([start, end, cpu])
            if turn in (-warmup, rounds - 1):
                wrong += not bool((tensor == dist.get_world_size(groups[name])).all())
    return {"times": times, "wrong": wrong, "used": observed.used}


def latency(
    groups: Groups, names: Sequence[str], control: str, size: int, blocks: int, operations: int
) -> dict[str, Any]:
    """Time blocking all-reduces back to back, in alternating blocks."""
    tensor = torch.zeros(size // 4, dtype=torch.float32)
    times: Times = {name: [] for name in names}
    observed = Observed()
    for turn in range(-1, blocks):
        for name in _turns(names, turn):
            group = groups[name]
            with observed.watch(name):
                dist.all_reduce(tensor, group=group)
            dist.barrier(group=groups[control])
            for _ in range(operations):
                start = time.monotonic_ns()
                dist.all_reduce(tensor, group=group)
                end = time.monotonic_ns()
                if turn >= 0:
                    times[name].append([start, end, 0])
    return {"times": times, "wrong": int(bool(tensor.any())), "used": observed.used}


def issued(
    groups: Groups,
    names: Sequence[str],
    control: str,
    size: int,
    rounds: int,
    modes: Sequence[str],
    warmup: int = 3,
) -> dict[str, Any]:
    """Time asynchronous all-reduces, with this thread spinning in pure Python ("busy") or asleep ("idle").

    Each entry, under "mode name": issued, finished, seen by Python, CPU time. Our work objects carry the
    communication process's own time of the last byte. Gloo has no such clock, so its end is the moment at
    which the spinning thread sees it. The thread looks every few microseconds, and Gloo's threads never need
    Python's lock.
    """
    tensor = torch.empty(max(size // 4, 1), dtype=torch.float32)
    meter = CpuMeter()
    times: Times = {f"{mode} {name}": [] for mode in modes for name in names}
    wrong = 0
    for turn in range(-warmup, rounds):
        for mode, name in product(_turns(modes, turn), _turns(names, turn)):
            tensor.fill_(1.0)
            dist.barrier(group=groups[control])
            cpu = meter.read()
            start = time.monotonic_ns()
            work = dist.all_reduce(tensor, group=groups[name], async_op=True)
            seen = _spin(work) if mode == "busy" else _sleep(work)
            work.wait()
            cpu = meter.read() - cpu
            wrong += tensor[0].item() != dist.get_world_size(groups[name])
            if turn >= 0:
                finished = getattr(work, "finished_at_ns", None) or seen
                started = getattr(work, "submitted_at_ns", None) or start
                times[f"{mode} {name}"].append([started, finished, seen, cpu])
    return {"times": times, "wrong": wrong}


def _spin(work: dist.Work) -> int:
    """Run pure Python, which keeps the interpreter lock, until the work is completed."""
    counter = 0
    while not work.is_completed():
        for _ in range(100):
            counter += 1
    return time.monotonic_ns()


def _sleep(work: dist.Work) -> int:
    work.wait()
    return time.monotonic_ns()


class Tower(nn.Module):
    """Plain layers: many gradients, little compute."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _ddp(model: Tower, group: Any) -> nn.Module:
    return DistributedDataParallel(model, process_group=group)


def _fsdp2(model: Tower, group: Any) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WRAPPERS: Mapping[str, Callable[[Tower, Any], nn.Module]] = {"ddp": _ddp, "fsdp2": _fsdp2}


def train(
    groups: Groups,
    names: Sequence[str],
    control: str,
    how: str,
    layers: int,
    width: int,
    steps: int,
    warmup: int = 3,
) -> dict[str, Any]:
    """Time whole training steps of one model per group, in turns; the copies must stay equal."""
    models: dict[str, nn.Module] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name in names:
        torch.manual_seed(7)
        models[name] = WRAPPERS[how](Tower(layers, width), groups[name])
        optimizers[name] = torch.optim.SGD(models[name].parameters(), lr=0.1)
    torch.manual_seed(100 + dist.get_rank())
    batch = torch.randn(8, width)
    meter = CpuMeter()
    times: Times = {name: [] for name in names}
    for turn in range(-warmup, steps):
        for name in _turns(names, turn):
            dist.barrier(group=groups[control])
            cpu = meter.read()
            start = time.monotonic_ns()
            models[name](batch).square().mean().backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            end = time.monotonic_ns()
            if turn >= 0:
                times[name].append([start, end, meter.read() - cpu])
    return {"times": times, "wrong": 0 if _equal([models[name] for name in names]) else 1}


def _equal(models: Sequence[nn.Module]) -> bool:
    first, *others = ([_local(parameter) for parameter in model.parameters()] for model in models)
    return all(
        torch.allclose(expected, actual, rtol=1e-4, atol=1e-6)
        for other in others
        for expected, actual in zip(first, other, strict=True)
    )


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()
