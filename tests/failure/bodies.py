"""Functions that workers execute on request. Results are plain JSON, and so are errors under test."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

_groups: list[Any] = []


def prepare() -> dict[str, Any]:
    """Register the backend and start the communication process, ready to join."""
    from barnraise.collectives.client import current_comm_process
    from barnraise.collectives.torch_patch.autoload import register

    register()
    comm_process = current_comm_process()
    member = comm_process.member
    return {"comm_process": comm_process.pid, "worker": member.worker.hex(), "port": member.port}


def join(place: str, rank: int, world: int, timeout: float = 60.0) -> float:
    started = time.monotonic()
    prepare()
    dist.init_process_group(
        "barnraise",
        store=dist.FileStore(place, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    return time.monotonic() - started


def leave() -> None:
    dist.destroy_process_group()


def leave_all() -> None:
    """Leave all groups, healthy or failed. A worker with remote calls is not used again."""
    from barnraise.rpc import api

    assert api._endpoint is None, "the test did not stop remote calls"
    for group in _groups:
        group.shutdown()
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def described(error: BaseException | None) -> dict[str, Any]:
    late = getattr(error, "late", None)
    return {
        "error": type(error).__name__ if error is not None else None,
        "peer": getattr(error, "peer", None),
        "late": list(late) if late is not None else None,
        "text": str(error)[:1000] if error is not None else "",
        "at_ns": time.monotonic_ns(),
    }


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """Run a call and return how it ended and when."""
    try:
        call()
    except Exception as error:
        return described(error)
    return described(None)


# operations


def checked(seed: int = 1, count: int = 10_007) -> bool:
    """Run an all-reduce of integers whose every element is known beforehand."""
    return _is_right(dist.group.WORLD, seed, count)


def checked_and_leave(seed: int) -> bool:
    right = checked(seed)
    leave()
    return right


def _is_right(group: Any, seed: int, count: int = 10_007) -> bool:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    index = torch.arange(count, dtype=torch.int64)
    values = _pattern(index, rank, seed)
    dist.all_reduce(values, group=group)
    return bool(torch.equal(values, torch.stack([_pattern(index, r, seed) for r in range(world)]).sum(0)))


def _pattern(index: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    return (index * 2_654_435_761 + rank * 40_503 + seed * 7919) % 1_000_003


def all_reduces_until_error(elements: int, begun: str) -> dict[str, Any]:
    """Run all-reduces until one fails. Create a file after the first."""
    count = 0

    def run() -> None:
        nonlocal count
        while True:
            dist.all_reduce(torch.ones(elements))
            count += 1
            if count == 1:
                Path(begun).touch()

    return outcome(run) | {"operations": count}


def one_all_reduce(elements: int = 1000) -> dict[str, Any]:
    return outcome(lambda: dist.all_reduce(torch.ones(elements)))


def pending_receive() -> dict[str, Any]:
    """Wait for a message that is never sent."""
    return outcome(lambda: dist.recv(torch.ones(1000)))


def pending_works(count: int) -> list[dict[str, Any]]:
    """Start several operations, none of which can complete."""
    works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(count)]
    return [outcome(work.wait) for work in works]


def abort_after(seconds: float, elements: int) -> dict[str, Any]:
    """Abort the group on another thread while the main thread waits for an operation."""
    group = _backend(dist.group.WORLD)
    called: list[int] = []

    def abort() -> None:
        time.sleep(seconds)
        called.append(time.monotonic_ns())
        group.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    end = outcome(lambda: dist.all_reduce(torch.ones(elements)))
    thread.join()
    return end | {"called_ns": called[0]}


def _backend(group: Any) -> Any:
    """Return our process group behind torch's handle."""
    return group if hasattr(group, "submitter") else group._get_backend(torch.device("cpu"))


def _calls() -> dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """Return the call of most ranks and the call of the odd rank, by case."""

    def reduce(elements: int = 100, dtype: torch.dtype = torch.float32, op: Any = dist.ReduceOp.SUM) -> Any:
        return lambda group: dist.all_reduce(torch.ones(elements, dtype=dtype), op=op, group=group)

    def broadcast(root: int) -> Any:
        return lambda group: dist.broadcast(torch.ones(100), group_src=root, group=group)

    return {
        "kind": (reduce(), broadcast(0)),
        "dtype": (reduce(), reduce(dtype=torch.int32)),
        "size": (reduce(), reduce(101)),
        "large size": (reduce(500_000), reduce(500_001)),
        "reduction": (reduce(), reduce(op=dist.ReduceOp.MAX)),
        "root": (broadcast(0), broadcast(2)),
        "barrier": (reduce(), lambda group: dist.barrier(group=group)),
    }


def disagree(case: str, odd: bool) -> dict[str, Any]:
    """Run mismatched calls on a separate group. Afterwards the default group must still work."""
    made: list[Any] = []

    def run() -> None:
        # others may disagree already while this rank still enters: then entering fails, with the same error
        made.append(dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=20)))
        _calls()[case][odd](made[0])
        # a broadcast's root does not wait for other ranks: it learns of a mismatch from its next call
        dist.barrier(group=made[0])

    started = time.monotonic()
    end = outcome(run)
    seconds = time.monotonic() - started
    if made:
        dist.destroy_process_group(made[0])
    return end | {"seconds": seconds, "right_after": checked(7)}


def monitored(seconds: float, missing: bool) -> dict[str, Any]:
    if missing:
        time.sleep(seconds + 1.0)
        return described(None)
    return outcome(lambda: dist.monitored_barrier(timeout=timedelta(seconds=seconds)))


def waited(seconds: float, missing: bool) -> dict[str, Any]:
    """Wait for a limited time for an operation of a group with a long timeout."""
    if missing:
        time.sleep(seconds + 1.0)
        return described(None)
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    return outcome(lambda: work.wait(timedelta(seconds=seconds)))


def limited_call(seconds: float, missing: bool) -> dict[str, Any]:
    """Call an operation in a block with a short timeout, in a group with a long one."""
    from barnraise.collectives import call_options

    if missing:
        time.sleep(seconds + 1.0)
        return described(None)
    with call_options(timeout=seconds):
        return outcome(lambda: dist.all_reduce(torch.ones(1000)))


def late_operation(seconds: float, missing: bool) -> dict[str, Any]:
    """Run an operation with a short timeout in a group with a long one."""
    if missing:
        time.sleep(seconds + 1.0)
        return described(None)
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=seconds)
    group = _backend(dist.group.WORLD)
    return outcome(lambda: group.allreduce([torch.ones(1000)], options).wait())


def receive_in_vain(source: int, seconds: float) -> list[dict[str, Any]]:
    """Receive in a block with a timeout, and wait for a limited time for a receive. No message comes."""
    from barnraise.collectives import call_options

    with call_options(timeout=seconds):
        limited = outcome(lambda: dist.recv(torch.zeros(3), src=source))
    work = dist.irecv(torch.zeros(3), src=source)
    return [limited, outcome(lambda: work.wait(timedelta(seconds=seconds)))]


def send_number(number: float, target: int) -> None:
    dist.send(torch.full((3,), number), dst=target)


def receive_number(source: int) -> float:
    tensor = torch.zeros(3)
    dist.recv(tensor, src=source)
    return float(tensor[2])


def make_group(place: str, rank: int, world: int, generation: int, timeout: float = 30.0) -> dict[str, Any]:
    """Create a group of a generation, without torch's registry."""
    from barnraise.collectives.c10d.create import create_group

    prepare()
    store = dist.FileStore(place, world)
    return outcome(lambda: _groups.append(create_group(store, rank, world, timeout, generation)))


def use_group(number: int = -1) -> dict[str, Any]:
    tensor = torch.ones(1000)
    end = outcome(lambda: _groups[number].allreduce([tensor]).wait())
    return end | {"value": float(tensor[0])}


def spin(elements: int, seconds: float) -> dict[str, Any]:
    """Submit, then hold Python's GIL in pure Python.

    Return when the communication process had the last byte, and when this thread looked.
    """
    tensor = torch.ones(elements)
    work = dist.all_reduce(tensor, async_op=True)
    issued = time.monotonic_ns()
    ends = issued + int(seconds * 1e9)
    number = 0
    while time.monotonic_ns() < ends:
        number = (number * 1_103_515_245 + 12_345) & 0x7FFFFFFF
    completed = bool(work.is_completed())
    work.wait()
    finished = getattr(work, "finished_at_ns", None)
    return {
        "issued": issued,
        "ends": ends,
        "finished": finished,
        "completed": completed,
        "v": float(tensor[0]),
    }


# what is held


def held() -> dict[str, list[int]]:
    from barnraise.collectives.client import current_comm_process

    gc.collect()
    return {"worker": _held_by(os.getpid()), "comm_process": _held_by(current_comm_process().pid)}


def _held_by(pid: int) -> list[int]:
    process = psutil.Process(pid)
    return [process.num_fds(), process.num_threads(), process.memory_info().rss // 1024]


def rebuild(place: str, rank: int, world: int, times: int, every: int) -> dict[str, Any]:
    """Create, use and destroy the group repeatedly. Return the open descriptors of the two processes."""
    samples, wrong, started = [], 0, time.monotonic()
    for turn in range(times):
        join(f"{place}-{turn}", rank, world)
        wrong += not checked(turn, 1000)
        leave()
        if turn % every == every - 1:
            samples.append(held())
    return {"samples": samples, "wrong": wrong, "seconds": time.monotonic() - started}


# a loop under attack


def checked_loop(stop: str) -> dict[str, Any]:
    """Run checked all-reduces until the file exists.

    The ranks agree on the last one through the sum itself.
    """
    turns, slowest, wrong = 0, 0.0, 0

    def run() -> None:
        nonlocal turns, slowest, wrong
        stopping = 0
        while not stopping:
            started = time.monotonic()
            wrong += not checked(turns)
            flag = torch.tensor([int(Path(stop).exists())])
            dist.all_reduce(flag)
            stopping = int(flag)
            slowest = max(slowest, time.monotonic() - started)
            turns += 1
            time.sleep(0.005)

    return outcome(run) | {"turns": turns, "slowest": slowest, "wrong": wrong}


def group_tag() -> int:
    """Return the number of the default group on the wire."""
    return int(_backend(dist.group.WORLD).submitter.group)


def links() -> list[str]:
    """Return descriptions of the default group's links."""
    return list(_backend(dist.group.WORLD).links)


# training


def train(steps: int, kill_at: int = -1, seed: int = 0) -> dict[str, Any]:
    """Run DDP steps on the default group, starting from this process's parameters."""
    model = _model()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(seed * 100 + dist.get_rank())
    done = 0

    def run() -> None:
        nonlocal done
        for step in range(steps):
            inputs = torch.randn(16, 256, generator=generator)
            optimizer.zero_grad()
            loss = wrapped(inputs).square().mean()
            if step == kill_at:
                os.kill(os.getpid(), 9)
            loss.backward()
            optimizer.step()
            done += 1

    end = outcome(run)
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    return end | {"steps": done, "sum": total}


_kept: list[torch.nn.Module] = []


def _model() -> torch.nn.Module:
    if not _kept:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)]
        _kept.append(torch.nn.Sequential(*layers))
    return _kept[0]
