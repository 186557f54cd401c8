"""Measure what metrics cost a worker: ``python -m benchmarks.metrics``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec

from barnraise.core import metrics
from barnraise.core.metrics import ProcessValues, catalogue
from barnraise.training.record.phase_clock import PhaseClock
from barnraise.training.record.step_counters import StepCounters

_REPEATS = 2000
_BATCHES = 9
_MICROBATCHES = 8


def microseconds(action: Callable[[], object]) -> float:
    """Return the median processor time of an action over several batches of calls."""
    times = []
    for _ in range(_BATCHES):
        start = time.thread_time()
        for _ in range(_REPEATS):
            action()
        times.append((time.thread_time() - start) / _REPEATS * 1e6)
    return statistics.median(times)


def main() -> None:
    """Measure and print the figures."""
    clock, counters = PhaseClock(), StepCounters()
    duration = metrics.histogram(catalogue.COLLECTIVE_TIME, "all_reduce", "ring")
    moved = metrics.counter(catalogue.COLLECTIVE_BYTES, "all_reduce")

    def step() -> None:
        for _ in range(_MICROBATCHES):
            with clock.measure("data"):
                pass
            clock.add("communication", 0.0)
            clock.add("compute", 0.01)
        with clock.measure("communication"):
            pass
        with clock.measure("vote"):
            pass
        counters.count(1, 64, 0.1, clock.take(0.1))
        counters.set_state(3, 0.5)

    def collective() -> None:
        duration.observe(0.002)
        moved.inc(4096)

    def report() -> None:
        msgspec.msgpack.encode(ProcessValues("worker", b"x" * 8, tuple(metrics.registry.samples())))

    print(f"a step of {_MICROBATCHES} micro-batches: {microseconds(step):.1f} µs")
    print(f"a collective: {microseconds(collective):.1f} µs")
    print(
        f"a report of {len(metrics.registry.samples())} samples, once a second: {microseconds(report):.0f} µs"
    )


if __name__ == "__main__":
    main()
