"""Commands of a rank while its peers are being killed: collectives until one fails, then rebuilding.

While it runs it publishes its progress (``benchmarks.ranks.progress``).
"""

from __future__ import annotations

import gc
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.ranks.measure import comm_process_pids, listener_pids
from benchmarks.ranks.progress import LAYOUT, PAGE, plan

if TYPE_CHECKING:
    from benchmarks.ranks.process import Worker


LOOK_SECONDS = 0.0005


def sent_bytes() -> int:
    """Return the bytes that this rank's communication process has sent so far, over all links."""
    from barnraise.collectives.client import current_comm_process

    return int(current_comm_process().statistics().values["barnraise_wire_sent_bytes_total"])


def _issue(kind: str, size: int) -> Any:
    world = dist.get_world_size()
    count = max(size // 4 // world, 1)
    whole = torch.ones(count * world)
    part = torch.ones(count)
    if kind == "all_reduce":
        return dist.all_reduce(whole, async_op=True)
    if kind == "all_gather":
        return dist.all_gather_into_tensor(whole, part, async_op=True)
    if kind == "reduce_scatter":
        return dist.reduce_scatter_tensor(part, whole, async_op=True)
    return dist.all_to_all_single(torch.empty_like(whole), whole, async_op=True)


def collectives_until_error(
    seed: int, smallest: int, largest: int, progress: str | None = None
) -> dict[str, Any]:
    """Run random collectives until one fails, and record progress if there is a page.

    Return the error and its time.
    """
    operation = 0
    with _page(progress) as page:
        while True:
            kind, size = plan(seed, operation, smallest, largest)
            try:
                if page is None:
                    _issue(kind, size).wait()
                else:
                    _watched(page, operation, kind, size)
            except Exception as error:  # noqa: BLE001 - any error is the result
                return _described(error, time.monotonic_ns()) | {"operation": operation}
            operation += 1


@contextmanager
def _page(path: str | None) -> Iterator[mmap.mmap | None]:
    if path is None:
        yield None
        return
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), PAGE) as page:
        yield page


def _watched(page: mmap.mmap, operation: int, kind: str, size: int) -> None:
    before, started = sent_bytes(), time.monotonic_ns()
    work = _issue(kind, size)
    sent = before
    while not work.is_completed():
        LAYOUT.pack_into(page, 0, operation, 1, started, before, sent, time.monotonic_ns())
        time.sleep(LOOK_SECONDS)
        sent = sent_bytes()
    work.wait()
    LAYOUT.pack_into(page, 0, operation, 0, started, before, sent, time.monotonic_ns())


def all_reduces(operations: int, size: int, skip: bool = False) -> dict[str, Any]:
    """Run all-reduces until one fails; with ``skip`` this rank lives on but never calls."""
    try:
        for _ in range(operations):
            if skip:
                time.sleep(60.0)
            dist.all_reduce(torch.ones(size // 4))
    except Exception as error:  # noqa: BLE001 - any error is the result
        return _described(error, time.monotonic_ns())
    return {"error": None, "at_ns": time.monotonic_ns()}


def _described(error: BaseException, at: int) -> dict[str, Any]:
    late = getattr(error, "late", None)
    return {
        "error": type(error).__name__,
        "peer": getattr(error, "peer", None),
        "late": list(late) if late is not None else None,
        "text": str(error)[:300],
        "at_ns": at,
    }


def checked_all_reduce(count: int, seed: int) -> bool:
    """Check an integer all-reduce whose every element is known beforehand."""
    rank, world = dist.get_rank(), dist.get_world_size()
    index = torch.arange(count, dtype=torch.int64)
    expected = torch.stack([_pattern(index, peer, seed) for peer in range(world)]).sum(0)
    values = _pattern(index, rank, seed)
    dist.all_reduce(values)
    return torch.equal(values, expected)


def _pattern(index: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    return (index * 2_654_435_761 + rank * 40_503 + seed) % 1_000_003


def rebuild(
    worker: Worker, backend: str, prefix: str, rank: int, world: int, times: int, every: int
) -> dict[str, Any]:
    """Create and destroy the group many times, and record the resources that the processes hold."""
    seconds, samples, wrong = [], [], 0
    for turn in range(times):
        start = time.monotonic()
        worker.join(backend, f"{prefix}/{turn}", rank, world)
        seconds.append(time.monotonic() - start)
        wrong += not checked_all_reduce(1000, turn)
        worker.leave()
        if turn % every == every - 1:
            samples.append(_held())
    return {"seconds": seconds, "samples": samples, "wrong": wrong}


def _held() -> dict[str, list[int]]:
    """Return descriptors, threads and resident kilobytes of this process, its communication process and
    listener.
    """
    gc.collect()
    held = {"worker": _held_by(os.getpid())}
    for who, pids in (("mover", comm_process_pids()), ("listener", listener_pids())):
        for pid in pids[:1]:
            held[who] = _held_by(pid)
    return held


def _held_by(pid: int) -> list[int]:
    process = psutil.Process(pid)
    return [process.num_fds(), process.num_threads(), process.memory_info().rss // 1024]
