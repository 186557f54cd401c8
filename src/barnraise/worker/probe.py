"""The speed probe: ``python -m barnraise.worker.probe`` prints one JSON line and ends.

Matrix products and copies, about two seconds for each device: a warm-up, then the median of repeats. With
torch it measures every device that torch can use, without it the CPU by numpy.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import psutil

from barnraise.topology.devices import DeviceSpeed, Kind, ProbeReport

_WATCH_S = 0.4
_PRODUCT_S = 0.9
_COPY_S = 0.5
_FEWEST = 5
_MOST = 200
# One repeat must be long against the clock and against waking threads, and short against the budget.
_REPEAT_S = 0.02
_SIZES = {"cpu": (256, 2048), "cuda": (1024, 8192), "mps": (512, 4096), "xpu": (1024, 8192)}
_OTHER_SIZES = (256, 4096)
_LARGEST_COPY = 256 * 1024 * 1024
_SMALLEST_COPY = 16 * 1024 * 1024

Nothing = Callable[[], object]


def main() -> int:
    report = probe()
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()
    return 0


def probe() -> ProbeReport:
    """Measure every device of this machine, one after the other."""
    busy = psutil.cpu_percent(interval=_WATCH_S) / 100
    torch, notes = _import_torch()
    before = psutil.cpu_times()
    if torch is None:
        speeds, accelerators = [_numpy_speed()], []
    else:
        speeds = []
        accelerators = _accelerators(torch)
        for kind, index in (("cpu", 0), *accelerators):
            try:
                speeds.append(_torch_speed(torch, kind, index, notes))
            except Exception as error:  # noqa: BLE001 - drivers fail in many ways; the other devices still count
                notes.append(f"{kind}:{index} could not be measured: {error}"[:400])
    return ProbeReport(
        torch=None if torch is None else str(torch.__version__),
        accelerators=None if torch is None else tuple(accelerators),
        speeds=tuple(speeds),
        busy=busy,
        stolen=_stolen(before, psutil.cpu_times()),
        notes=tuple(notes[:32]),
    )


def _import_torch() -> tuple[Any | None, list[str]]:
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        import torch
    except ImportError:
        return None, []
    except Exception as error:  # noqa: BLE001 - a torch that cannot be loaded is a finding, not our failure
        return None, [f"torch is installed but cannot be loaded: {error}"[:400]]
    return torch, []


def _accelerators(torch: Any) -> list[tuple[Kind, int]]:
    """Return the accelerators of this torch: CUDA, ROCm (which it calls cuda), MPS, XPU and others."""
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None:
        return []
    return [(current.type, index) for index in range(torch.accelerator.device_count())]


def _torch_speed(torch: Any, kind: Kind, index: int, notes: list[str]) -> DeviceSpeed:
    device = torch.device(kind) if kind in ("cpu", "mps") else torch.device(kind, index)
    settle: Nothing = (lambda: None) if kind == "cpu" else torch.accelerator.synchronize
    name, memory, free = _torch_facts(torch, kind, index)
    if kind != "cpu" and free < memory // 2:
        notes.append(f"{kind}:{index} is in use: half of its memory is taken"[:400])

    def product(size: int) -> Nothing:
        left, right, out = (torch.rand(size, size, device=device) for _ in range(3))
        return lambda: torch.mm(left, right, out=out)

    smallest, largest = _SIZES.get(kind, _OTHER_SIZES)
    size = _fitting_size(product, settle, smallest, largest)
    products = _repeat(product(size), settle, _PRODUCT_S)
    length = _copy_length(free)
    source = torch.ones(length // 4, device=device)
    target = torch.empty_like(source)
    copies = _repeat(lambda: target.copy_(source), settle, _COPY_S)
    return _speed(kind, index, name, memory, size, products, length, copies)


def _torch_facts(torch: Any, kind: Kind, index: int) -> tuple[str, int, int]:
    """Name, memory and free memory; no name where the machine's own description has a better one."""
    host = psutil.virtual_memory()
    if kind in ("cpu", "mps"):
        return "", int(host.total), int(host.available)
    module = torch.get_device_module(kind)
    if not hasattr(module, "get_device_properties"):  # an accelerator that only its own package knows
        return kind, 0, int(host.available)
    memory = int(module.get_device_properties(index).total_memory)
    free = int(module.mem_get_info(index)[0]) if hasattr(module, "mem_get_info") else memory
    return str(module.get_device_name(index))[:128], memory, free


def _numpy_speed() -> DeviceSpeed:
    random = np.random.default_rng(1)

    def product(size: int) -> Nothing:
        left, right = (random.random((size, size), dtype=np.float32) for _ in range(2))
        out = np.empty_like(left)
        return lambda: np.matmul(left, right, out=out)

    smallest, largest = _SIZES["cpu"]
    size = _fitting_size(product, lambda: None, smallest, largest)
    products = _repeat(product(size), lambda: None, _PRODUCT_S)
    memory = psutil.virtual_memory()
    length = _copy_length(int(memory.available))
    source = np.ones(length // 4, dtype=np.float32)
    target = np.empty_like(source)
    copies = _repeat(lambda: np.copyto(target, source), lambda: None, _COPY_S)
    return _speed("cpu", 0, "", int(memory.total), size, products, length, copies)


def _fitting_size(product: Callable[[int], Nothing], settle: Nothing, size: int, largest: int) -> int:
    """Return the smallest size whose product takes long enough to be timed; this also warms up."""
    while True:
        seconds = min(_repeat(product(size), settle, 0.0, min_count=2))
        if seconds >= _REPEAT_S or size * 2 > largest:
            return size
        size *= 2


def _copy_length(free: int) -> int:
    """Return a length that is larger than the caches and small against the free memory."""
    return max(_SMALLEST_COPY, min(_LARGEST_COPY, free // 16)) // 4096 * 4096


def _repeat(action: Nothing, settle: Nothing, budget_s: float, min_count: int = _FEWEST) -> list[float]:
    """Return the seconds of each repeat, after one that does not count."""
    action()
    settle()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < min_count or (time.perf_counter() < end and len(times) < _MOST):
        begin = time.perf_counter()
        action()
        settle()
        times.append(time.perf_counter() - begin)
    return times


def _speed(
    kind: Kind,
    index: int,
    name: str,
    memory: int,
    size: int,
    products: list[float],
    length: int,
    copies: list[float],
) -> DeviceSpeed:
    return DeviceSpeed(
        kind=kind,
        index=index,
        name=name,
        memory_bytes=memory,
        tflops_fp32=round(2 * size**3 / statistics.median(products) / 1e12, 5),
        # A copy reads every byte and writes it.
        memory_gbps=round(2 * length / statistics.median(copies) / 1e9, 3),
        spread=round(max(_spread(products), _spread(copies)), 4),
    )


def _spread(times: list[float]) -> float:
    lower, middle, upper = statistics.quantiles(times, n=4)
    return (upper - lower) / middle


def _stolen(before: Any, after: Any) -> float:
    """Return the share of CPU time that the host of a virtual machine gave to others."""
    total = sum(after) - sum(before)
    taken = getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)
    return round(max(0.0, taken / total), 4) if total > 0 else 0.0


if __name__ == "__main__":
    sys.exit(main())
